//! Which engine gets a request.

use std::collections::VecDeque;
use std::fmt;
use std::str::FromStr;

use rustc_hash::FxHashMap;

use crate::config::EngineConfig;
use crate::error::ConfigError;

use super::super::trace::TRACE_BLOCK_TOKENS;

/// How the router of an [`super::OfflineRun`] chooses. All are deterministic: equals go to the first engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Router {
    /// One engine after the other.
    #[default]
    RoundRobin,
    /// The engine with the fewest requests that have not ended.
    LeastLoaded,
    /// The engine where the request costs least: prompt tokens that it would have to compute, and tokens
    /// that it holds for its active requests (the cost function of NVIDIA Dynamo's KV router, in tokens, both parts
    /// weighted alike).
    ///
    /// What an engine has cached is estimated from the prompts that were sent to it, the least recently used
    /// blocks beyond its pool's size forgotten (as SGLang's router does). Traces without block ids have no prefixes in
    /// common, and it balances the tokens held.
    PrefixAware,
}

impl fmt::Display for Router {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::RoundRobin => "round-robin",
            Self::LeastLoaded => "least-loaded",
            Self::PrefixAware => "prefix-aware",
        })
    }
}

impl FromStr for Router {
    type Err = ConfigError;

    fn from_str(name: &str) -> Result<Self, ConfigError> {
        [Self::RoundRobin, Self::LeastLoaded, Self::PrefixAware]
            .into_iter()
            .find(|router| router.to_string() == name)
            .ok_or_else(|| ConfigError::new("router", name, "round-robin, least-loaded or prefix-aware"))
    }
}

/// What the router sees of an engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Load {
    /// Requests that have not ended.
    pub(super) active_requests: usize,
    /// Their tokens so far, prompt and output.
    pub(super) held_tokens: u64,
}

/// A router and what it remembers.
#[derive(Debug)]
pub(super) enum Routing {
    RoundRobin { next: usize },
    LeastLoaded,
    PrefixAware { sent: Vec<SentBlocks> },
}

impl Routing {
    pub(super) fn new(router: Router, workers: usize, config: &EngineConfig) -> Self {
        match router {
            Router::RoundRobin => Self::RoundRobin { next: 0 },
            Router::LeastLoaded => Self::LeastLoaded,
            Router::PrefixAware => {
                let tokens = config.kind.usable_blocks() * u64::from(config.kind.block_size());
                let capacity = usize::try_from(tokens / u64::from(TRACE_BLOCK_TOKENS)).unwrap_or(usize::MAX);
                Self::PrefixAware { sent: vec![SentBlocks::new(capacity); workers] }
            }
        }
    }

    /// Whether it chooses by what the engines are doing.
    pub(super) fn looks_at_load(&self) -> bool {
        !matches!(self, Self::RoundRobin { .. })
    }

    /// The index of the engine for a prompt. `loads` has one entry per engine, at least one.
    pub(super) fn choose(
        &mut self,
        prompt_tokens: u32,
        hash_ids: &[u64],
        loads: impl ExactSizeIterator<Item = Load>,
    ) -> usize {
        match self {
            Self::RoundRobin { next } => {
                let chosen = *next;
                *next = (chosen + 1) % loads.len();
                chosen
            }
            Self::LeastLoaded => cheapest(loads.map(|load| load.active_requests as u64)),
            Self::PrefixAware { sent } => {
                // A part-filled block is never found.
                let full = &hash_ids[..hash_ids.len().min((prompt_tokens / TRACE_BLOCK_TOKENS) as usize)];
                let costs = loads.zip(sent.iter()).map(|(load, sent)| {
                    let found = u64::from(TRACE_BLOCK_TOKENS) * sent.prefix(full);
                    u64::from(prompt_tokens) - found + load.held_tokens
                });
                let chosen = cheapest(costs);
                sent[chosen].add(full);
                chosen
            }
        }
    }
}

fn cheapest(costs: impl Iterator<Item = u64>) -> usize {
    costs.enumerate().min_by_key(|&(_, cost)| cost).map_or(0, |(index, _)| index)
}

/// Blocks that one engine was sent, the most recently used ones.
#[derive(Debug, Clone)]
pub(super) struct SentBlocks {
    capacity: usize,
    /// Block id → when it was used last.
    last_use: FxHashMap<u64, u64>,
    /// Uses in order; those of a block that was used again since do not count.
    uses: VecDeque<(u64, u64)>,
    clock: u64,
}

impl SentBlocks {
    fn new(capacity: usize) -> Self {
        Self { capacity, last_use: FxHashMap::default(), uses: VecDeque::new(), clock: 0 }
    }

    /// How many blocks of a prompt, from its start, are remembered.
    fn prefix(&self, ids: &[u64]) -> u64 {
        ids.iter().take_while(|id| self.last_use.contains_key(id)).count() as u64
    }

    fn add(&mut self, ids: &[u64]) {
        for &id in ids {
            self.clock += 1;
            self.last_use.insert(id, self.clock);
            self.uses.push_back((self.clock, id));
        }
        while self.last_use.len() > self.capacity
            && let Some((at, id)) = self.uses.pop_front()
        {
            if self.last_use.get(&id) == Some(&at) {
                self.last_use.remove(&id);
            }
        }
        // Old uses of blocks that are in use all the time.
        if self.uses.len() > 2 * self.capacity.max(ids.len()) {
            let last_use = &self.last_use;
            self.uses.retain(|(at, id)| last_use.get(id) == Some(at));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn load(active_requests: usize, held_tokens: u64) -> Load {
        Load { active_requests, held_tokens }
    }

    fn choices(router: Router, loads: [Load; 3], prompts: &[(u32, &[u64])]) -> Vec<usize> {
        let mut routing = Routing::new(router, 3, &EngineConfig::default());
        prompts.iter().map(|&(tokens, ids)| routing.choose(tokens, ids, loads.into_iter())).collect()
    }

    #[test]
    fn each_router_follows_its_rule_and_the_first_engine_wins_a_tie() {
        let prompts: [(u32, &[u64]); 4] = [(1024, &[1, 2]), (1024, &[1, 3]), (512, &[4]), (100, &[4])];
        let idle = [Load::default(); 3];
        assert_eq!(choices(Router::RoundRobin, idle, &prompts), [0, 1, 2, 0]);
        assert_eq!(choices(Router::LeastLoaded, [load(2, 0), load(1, 9_000), load(1, 0)], &prompts), [1; 4]);
        assert_eq!(choices(Router::PrefixAware, idle, &prompts), [0; 4], "all cost nothing more there");
        let busy = [load(1, 600), load(1, 0), load(1, 90)];
        assert_eq!(choices(Router::PrefixAware, busy, &prompts), [1, 1, 1, 1]);
        // The first block is cached by the engine that is busier by less than a block, then by more.
        for (held, expected) in [(511, 0), (512, 0), (513, 1)] {
            let mut routing = Routing::new(Router::PrefixAware, 2, &EngineConfig::default());
            assert_eq!(routing.choose(1024, &[1, 2], [load(0, 0), load(0, 1)].into_iter()), 0);
            assert_eq!(routing.choose(1024, &[1, 3], [load(1, held), load(0, 0)].into_iter()), expected, "{held}");
        }
    }

    #[test]
    fn the_least_recently_used_blocks_are_forgotten_and_memory_stays_bounded() {
        let mut sent = SentBlocks::new(3);
        sent.add(&[1, 2, 3]);
        sent.add(&[1]);
        sent.add(&[4]);
        assert_eq!((sent.prefix(&[1, 2]), sent.prefix(&[3, 4]), sent.prefix(&[2])), (1, 2, 0));
        for _ in 0..1_000 {
            sent.add(&[1, 3]);
        }
        assert_eq!(sent.prefix(&[1, 3, 4]), 3);
        assert!(sent.uses.len() <= 8, "{}", sent.uses.len());
    }

    #[test]
    fn names_are_read_as_they_are_written() {
        for router in [Router::RoundRobin, Router::LeastLoaded, Router::PrefixAware] {
            assert_eq!(router.to_string().parse(), Ok(router));
        }
        let error = Router::from_str("random").expect_err("there is none");
        assert_eq!(error.to_string(), "router = random: round-robin, least-loaded or prefix-aware");
    }
}
