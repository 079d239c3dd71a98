//! Which waiting requests share a branch of the tree.

use std::cmp::Reverse;

use rustc_hash::FxHashMap;

use super::{NodeId, RadixTree};

/// The waiting requests at and below a node.
#[derive(Debug, Default)]
struct Waiting {
    weight: usize,
    /// Those whose prefix ends here.
    here: Vec<usize>,
    /// Children with any.
    below: Vec<NodeId>,
}

impl RadixTree {
    /// Orders the waiting, given where the stored prefix of each one ends: depth first, the branch with
    /// most of them first, the older branch among equals; those at a node after those below it.
    pub(crate) fn depth_first(&self, ends: &[Option<NodeId>]) -> Vec<usize> {
        // Roots are taken as one: those without any prefix come last.
        let mut waiting: FxHashMap<Option<NodeId>, Waiting> = FxHashMap::default();
        for (index, &end) in ends.iter().enumerate() {
            waiting.entry(end).or_default().here.push(index);
            let mut node = end;
            while let Some(id) = node {
                let parent =
                    self.nodes[id as usize].parent.filter(|&parent| self.nodes[parent as usize].parent.is_some());
                let at = waiting.entry(node).or_default();
                at.weight += 1;
                if at.weight == 1 {
                    waiting.entry(parent).or_default().below.push(id);
                }
                node = parent;
            }
        }
        let mut order = Vec::with_capacity(ends.len());
        let mut stack = vec![(None, false)];
        while let Some((node, expanded)) = stack.pop() {
            let Some(at) = waiting.get(&node) else { continue };
            if expanded {
                order.extend_from_slice(&at.here);
                continue;
            }
            stack.push((node, true));
            let mut below = at.below.clone();
            below.sort_by_key(|&id| {
                let weight = waiting.get(&Some(id)).map_or(0, |at| at.weight);
                (Reverse(weight), self.nodes[id as usize].created)
            });
            stack.extend(below.into_iter().rev().map(|id| (Some(id), false)));
        }
        order
    }
}
