//! The tree alone: prefixes, splits, locks and the order of eviction.

use super::*;
use crate::kv::ExtraKeys;
use crate::request::Request;

/// A sequence of tokens without keys.
struct Plain(Vec<u32>, ExtraKeys);

impl BlockContent for Plain {
    fn fill(&self, start: usize, out: &mut [u32]) {
        out.copy_from_slice(&self.0[start..start + out.len()]);
    }

    fn extra_keys(&self) -> &ExtraKeys {
        &self.1
    }
}

/// A tree that hands out pages by counting.
struct Rig {
    tree: RadixTree,
    next_page: BlockId,
    duplicates: Vec<BlockId>,
}

impl Rig {
    fn new(page_size: u32, policy: RadixEvictionPolicy) -> Self {
        Self { tree: RadixTree::new(page_size, policy), next_page: 1, duplicates: Vec::new() }
    }

    fn find(&mut self, tokens: &[u32], limit: u32) -> Match {
        let content = Plain(tokens.to_vec(), ExtraKeys::of(&Request::new(vec![0], 1)));
        self.tree.match_prefix(&Namespace::default(), &content, limit)
    }

    /// Stores tokens behind a prefix that is held.
    fn store(&mut self, held: Match, tokens: &[u32]) -> Entered {
        self.store_in(&Namespace::default(), held, tokens, 0)
    }

    fn store_in(&mut self, namespace: &Namespace, held: Match, tokens: &[u32], priority: i64) -> Entered {
        let count = tokens.len() as u32 / self.tree.page_size as u32;
        let mut pages: Vec<_> = (self.next_page..).take(count as usize).collect();
        self.next_page += count;
        let entry = Entry { namespace, held, tokens, pages: &mut pages, counted: 0, priority };
        let entered = self.tree.insert(entry, &mut self.duplicates);
        let mut stored = Vec::new();
        self.tree.pages_to(entered.node, &mut stored);
        assert!(stored.ends_with(&pages), "the sequence goes on with the tree's pages");
        entered
    }

    /// The pages of all evictions, in order.
    fn drain(&mut self) -> Vec<Vec<BlockId>> {
        std::iter::from_fn(|| self.tree.evict().map(|evicted| evicted.pages)).collect()
    }

    fn sizes(&self) -> (u64, u64) {
        (self.tree.evictable_tokens(), self.tree.protected_tokens())
    }
}

fn tokens(range: std::ops::Range<u32>) -> Vec<u32> {
    range.collect()
}

const NOTHING: Match = Match { tokens: 0, node: None };

#[test]
fn case_27_hits_are_token_exact_with_page_1_and_whole_pages_otherwise() {
    for (page_size, stored, limit, expected) in
        [(1, 10, 9, 9), (16, 32, 31, 16), (16, 48, 32, 32), (16, 16, 15, 0), (7, 21, 20, 14), (64, 640, 639, 576)]
    {
        let mut rig = Rig::new(page_size, RadixEvictionPolicy::Lru);
        rig.store(NOTHING, &tokens(0..stored));
        assert_eq!(rig.find(&tokens(0..stored), limit).tokens, expected, "page size {page_size}");
    }
}

#[test]
fn case_28_a_divergent_prompt_splits_a_node_and_both_ends_can_be_found() {
    let mut rig = Rig::new(2, RadixEvictionPolicy::Lru);
    let a: Vec<u32> = vec![1, 2, 3, 4, 5, 6];
    let b: Vec<u32> = vec![1, 2, 3, 9, 5, 6];
    rig.store(NOTHING, &a);
    let shared = rig.find(&b, 6);
    assert_eq!(shared.tokens, 2, "3, 9 is another page than 3, 4");
    rig.store(shared, &b[2..]);
    assert_eq!([rig.find(&a, 6).tokens, rig.find(&b, 6).tokens], [6, 6]);
    let (a, b) = (rig.find(&a, 6), rig.find(&b, 6));
    rig.tree.lock(a.node);
    rig.tree.lock(b.node);
    assert_eq!(shared.node.map(|node| rig.tree.node(node).2), Some(2), "both use the shared page");
    assert_eq!(rig.sizes(), (0, 10));
    rig.tree.unlock(a.node);
    assert_eq!(rig.sizes(), (4, 6));
    rig.tree.unlock(b.node);
    assert_eq!(rig.sizes(), (10, 0));
}

#[test]
fn case_29_only_leaves_are_evicted_and_a_parent_after_its_children() {
    let mut rig = Rig::new(1, RadixEvictionPolicy::Lru);
    let stem = rig.store(NOTHING, &[1, 2]);
    let held = Match { tokens: 2, node: stem.node };
    rig.store(held, &[3]);
    rig.store(held, &[4]);
    let kept = rig.find(&[1, 2, 3], 3);
    rig.tree.lock(kept.node);
    assert_eq!(rig.drain(), [vec![4]], "the locked leaf and what is above it stay");
    rig.tree.unlock(kept.node);
    assert_eq!(rig.drain(), [vec![3], vec![1, 2]]);
    assert_eq!(rig.sizes(), (0, 0));
    assert_eq!(rig.find(&[1, 2], 2), NOTHING);
}

#[test]
fn case_30_the_output_goes_before_the_prompt() {
    let mut rig = Rig::new(2, RadixEvictionPolicy::Lru);
    let done = rig.store(NOTHING, &tokens(0..12));
    rig.tree.split_path(done.node, 8, 1);
    rig.store(NOTHING, &tokens(100..104));
    assert_eq!(rig.drain(), [vec![5, 6], vec![1, 2, 3, 4], vec![7, 8]]);
}

#[test]
fn case_31_what_is_there_already_is_not_stored_twice() {
    let mut rig = Rig::new(2, RadixEvictionPolicy::Lru);
    rig.store(NOTHING, &tokens(0..6));
    let second = rig.store(NOTHING, &tokens(0..8));
    assert_eq!(rig.duplicates, [4, 5, 6], "its own three pages are free again");
    assert!(second.new.is_some());
    let third = rig.store(NOTHING, &tokens(0..4));
    assert_eq!((rig.duplicates.split_off(3), third.new), (vec![8, 9], None));
    let mut pages = Vec::new();
    rig.tree.pages_to(second.node, &mut pages);
    assert_eq!(pages, [1, 2, 3, 7]);
}

#[test]
fn a_match_is_an_access_and_a_split_leaves_the_rest_older() {
    let mut rig = Rig::new(1, RadixEvictionPolicy::Lru);
    rig.store(NOTHING, &[1, 2, 3, 4]);
    rig.store(NOTHING, &[9]);
    assert_eq!(rig.find(&[1, 2, 7], 3).tokens, 2);
    rig.store(NOTHING, &[8]);
    assert_eq!(rig.drain(), [vec![5], vec![3, 4], vec![1, 2], vec![6]]);
}

#[test]
fn every_policy_has_its_own_order() {
    let order = |policy| {
        let mut rig = Rig::new(1, policy);
        // Page 1 is the oldest, stored three times and of low priority; page 2 was used last; page 3 is the youngest.
        rig.store_in(&Namespace::default(), NOTHING, &[1], -5);
        rig.store_in(&Namespace::default(), NOTHING, &[2], 0);
        rig.store_in(&Namespace::default(), NOTHING, &[3], 7);
        rig.store_in(&Namespace::default(), NOTHING, &[1], -5);
        rig.store_in(&Namespace::default(), NOTHING, &[1], -9);
        rig.find(&[2], 1);
        rig.drain().concat()
    };
    assert_eq!(order(RadixEvictionPolicy::Lru), [3, 1, 2]);
    assert_eq!(order(RadixEvictionPolicy::Mru), [2, 1, 3]);
    assert_eq!(order(RadixEvictionPolicy::Fifo), [1, 2, 3]);
    assert_eq!(order(RadixEvictionPolicy::Filo), [3, 2, 1]);
    assert_eq!(order(RadixEvictionPolicy::Lfu), [3, 2, 1]);
    assert_eq!(order(RadixEvictionPolicy::Priority), [1, 2, 3]);
    assert_eq!(order(RadixEvictionPolicy::Slru), [3, 2, 1]);
}

#[test]
fn a_sequence_does_not_count_its_own_tokens_twice() {
    let mut rig = Rig::new(1, RadixEvictionPolicy::Lfu);
    let chunk = rig.store(NOTHING, &[1, 2]);
    let held = Match { tokens: 2, node: chunk.node };
    let entry =
        Entry { namespace: &Namespace::default(), held, tokens: &[3], pages: &mut [99], counted: 2, priority: 0 };
    rig.tree.insert(entry, &mut rig.duplicates);
    rig.store(NOTHING, &[9]);
    rig.store(NOTHING, &[9]);
    assert_eq!(rig.drain(), [vec![99], vec![1, 2], vec![3]], "stored once each, but for the last");
}

#[test]
fn namespaces_share_nothing_and_leave_nothing_behind() {
    let mut rig = Rig::new(1, RadixEvictionPolicy::Lru);
    for salt in 0..100 {
        let namespace = Namespace { lora_name: None, cache_salt: Some(format!("salt {salt}").into()) };
        assert!(rig.store_in(&namespace, NOTHING, &[1, 2], 0).new.is_some());
    }
    assert_eq!(rig.find(&[1, 2], 2), NOTHING);
    assert_eq!(rig.drain().len(), 100);
    assert_eq!((rig.tree.roots.len(), rig.tree.namespaces.len()), (0, 0));
    let nodes = rig.tree.nodes.len();
    rig.store(NOTHING, &[1]);
    assert_eq!(rig.tree.nodes.len(), nodes, "slots are used again");
}

#[test]
fn the_waiting_are_ordered_by_the_branch_that_most_wait_for() {
    let mut rig = Rig::new(1, RadixEvictionPolicy::Lru);
    let a = rig.store(NOTHING, &[1]);
    let held = Match { tokens: 1, node: a.node };
    let (ab, ac) = (rig.store(held, &[2]), rig.store(held, &[3]));
    let d = rig.store(NOTHING, &[4]);
    // Two wait for d, three below or at a: of these two for ac.
    let ends = [d.node, None, a.node, ac.node, d.node, ab.node, ac.node];
    assert_eq!(rig.tree.depth_first(&ends), [3, 6, 5, 2, 0, 4, 1]);
    assert_eq!(rig.tree.depth_first(&[None, None]), [0, 1]);
    assert_eq!(rig.tree.depth_first(&[d.node, a.node]), [1, 0], "among equals the older branch");
}
