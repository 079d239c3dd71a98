//! What the engine has said so far, held against what the requests asked for.

use std::collections::BTreeMap;

use standin::{
    BlockExtraKeys, Effects, EngineConfig, EngineTime, FinishReason, FinishedCounts, KvEvent, OutputPlan, Pass,
    PrefillStats, PrefixCacheStats, Request, RequestError, RowKind, SequenceId, TokenGenerator,
};

/// Why the scheduler must refuse a request, if it must.
pub(crate) fn refusal(request: &Request, config: &EngineConfig) -> Option<RequestError> {
    let (prompt_tokens, max_model_len) = (request.prompt.len() as u64, config.max_model_len);
    let mut forbidden = request.stop_token_ids.clone();
    forbidden.extend(request.eos_token_id);
    let no_token_is_left = (0..config.vocab_size).all(|token| forbidden.contains(&token));
    if prompt_tokens == 0 {
        Some(RequestError::EmptyPrompt)
    } else if prompt_tokens >= u64::from(max_model_len) {
        Some(RequestError::PromptTooLong { prompt_tokens, max_model_len })
    } else if asked_for(request) == Some(0) {
        Some(RequestError::ZeroOutput)
    } else if request.output == OutputPlan::Generated && no_token_is_left {
        Some(RequestError::NoTokenLeft { vocab_size: config.vocab_size })
    } else {
        None
    }
}

fn asked_for(request: &Request) -> Option<usize> {
    match &request.output {
        OutputPlan::Tokens(tokens) => Some(tokens.len()),
        _ => request.max_output_tokens.map(|max| max as usize),
    }
}

/// Every token that a request produces, and why it ends with the last one.
pub(crate) fn answer(request: &Request, tie_key: u128, config: &EngineConfig) -> (Vec<u32>, FinishReason) {
    let mut forbidden = request.stop_token_ids.clone();
    forbidden.extend(request.eos_token_id);
    forbidden.sort_unstable();
    forbidden.dedup();
    let generator = TokenGenerator::new(config.seed, tie_key, config.vocab_size);
    let room = config.max_model_len as usize - request.prompt.len();
    let mut tokens = Vec::new();
    while tokens.len() < asked_for(request).unwrap_or(room).min(room) {
        let token = match &request.output {
            OutputPlan::Tokens(plan) => plan[tokens.len()],
            _ => generator.token(tokens.len() as u32, &forbidden),
        };
        tokens.push(token);
        if request.eos_token_id == Some(token) && !request.ignore_eos {
            return (tokens, FinishReason::Stop { stop_token: None });
        }
        if request.stop_token_ids.contains(&token) {
            return (tokens, FinishReason::Stop { stop_token: Some(token) });
        }
    }
    (tokens, FinishReason::Length)
}

/// What beside its tokens identifies a block of a request.
fn extra_keys_of(request: &Request, index: usize, block_size: usize) -> Option<BlockExtraKeys> {
    let (start, end) = ((index * block_size) as i64, ((index + 1) * block_size) as i64);
    let mut keys = BlockExtraKeys { lora_name: request.lora_name.clone(), ..BlockExtraKeys::default() };
    for item in &request.multimodal {
        let (first, past) = (i64::from(item.offset), i64::from(item.offset + item.num_tokens));
        if first < end && past > start {
            keys.multimodal.push((item.identifier.clone(), first - start));
        }
    }
    if index == 0 {
        keys.cache_salt.clone_from(&request.cache_salt);
    }
    (keys != BlockExtraKeys::default()).then_some(keys)
}

/// One accepted request.
#[derive(Debug)]
struct Account {
    request: Request,
    num_prompt: u32,
    answer: Vec<u32>,
    finish: FinishReason,
    arrival: EngineTime,
    visible_from: EngineTime,
    admitted: Option<(EngineTime, u32)>,
    first_token_at: Option<EngineTime>,
    produced: usize,
    end: Option<End>,
    /// A pass has reported that it is gone.
    reported: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// An output said so.
    Shown(FinishReason),
    /// A cancel was told so.
    Cancelled,
}

/// The accounts of all requests, and what the counters must say.
#[derive(Debug)]
pub(crate) struct Ledger {
    config: EngineConfig,
    caching: bool,
    accounts: BTreeMap<SequenceId, Account>,
    last_boundary: EngineTime,
    num_passes: u64,
    num_preemptions: u64,
    prompt_tokens: u64,
    generation_tokens: u64,
    finished: FinishedCounts,
    prefix_cache: PrefixCacheStats,
    /// Look-ups of the pass in flight.
    look_ups: PrefixCacheStats,
}

impl Ledger {
    pub(crate) fn new(config: &EngineConfig, caching: bool) -> Self {
        Self {
            config: config.clone(),
            caching,
            accounts: BTreeMap::new(),
            last_boundary: EngineTime::ZERO,
            num_passes: 0,
            num_preemptions: 0,
            prompt_tokens: 0,
            generation_tokens: 0,
            finished: FinishedCounts::default(),
            prefix_cache: PrefixCacheStats::default(),
            look_ups: PrefixCacheStats::default(),
        }
    }

    /// Opens an account.
    pub(crate) fn accepted(&mut self, id: SequenceId, request: Request, tie_key: u128, sent: EngineTime) {
        let arrival = request.arrival.unwrap_or(sent);
        let (answer, finish) = answer(&request, tie_key, &self.config);
        let account = Account {
            num_prompt: request.prompt.len() as u32,
            request,
            answer,
            finish,
            arrival,
            visible_from: arrival.max(sent),
            admitted: None,
            first_token_at: None,
            produced: 0,
            end: None,
            reported: false,
        };
        assert!(self.accounts.insert(id, account).is_none());
    }

    pub(crate) fn cancelled(&mut self, id: SequenceId) {
        let account = self.accounts.get_mut(&id).expect("a cancel removes what was submitted");
        assert_eq!(account.end.replace(End::Cancelled), None, "{id} was cancelled after its end");
        self.finished.aborted += 1;
    }

    pub(crate) fn preempted_by_reset(&mut self, count: usize) {
        self.num_preemptions += count as u64;
    }

    pub(crate) fn num_submitted(&self) -> usize {
        self.accounts.len()
    }

    pub(crate) fn num_ended(&self) -> usize {
        self.accounts.values().filter(|account| account.end.is_some()).count()
    }

    /// Passes that suffice to end everything: each computes at least one token for the request that is served
    /// first, or stands back for a decode, and nobody takes that place from it before its end.
    pub(crate) fn bound_on_passes(&self, prefill_schedule_interval: u32) -> usize {
        let live = self.accounts.values().filter(|account| account.end.is_none());
        let tokens: usize = live.map(|account| account.num_prompt as usize + account.answer.len() + 2).sum();
        tokens * prefill_schedule_interval as usize + 2
    }

    pub(crate) fn began(&mut self, pass: &Pass) {
        for &id in pass.ended() {
            let account = self.accounts.get_mut(&id).expect("only what was submitted ends");
            assert!(!account.reported, "{id} ended twice");
            account.reported = true;
        }
        self.num_preemptions += pass.preempted().len() as u64;
        self.look_ups = PrefixCacheStats::default();
        for row in pass.rows().iter().filter(|row| row.kind != RowKind::Running) {
            let resumed = row.kind == RowKind::Resumed;
            let account = self.accounts.get_mut(&row.sequence).expect("only what was submitted runs");
            assert!(pass.started_at() >= account.visible_from, "{} runs before its arrival", row.sequence);
            assert_eq!(account.admitted.is_some(), resumed, "{} is new once", row.sequence);
            if !resumed {
                account.admitted = Some((pass.started_at(), row.computed_before));
                self.prompt_tokens += u64::from(account.num_prompt);
            }
            if self.caching && !account.request.skip_reading_prefix_cache {
                let stats = &mut self.look_ups;
                let (requests, queries, hits) = match resumed {
                    true => (&mut stats.preempted_requests, &mut stats.preempted_queries, &mut stats.preempted_hits),
                    false => (&mut stats.requests, &mut stats.queries, &mut stats.hits),
                };
                *requests += 1;
                *queries += u64::from(account.num_prompt) + account.produced as u64;
                *hits += u64::from(row.computed_before);
            } else {
                assert_eq!(row.computed_before, 0, "a hit without a look-up");
            }
        }
        let new = pass.rows().iter().filter(|row| row.kind == RowKind::New);
        let new: Vec<_> = new.map(|row| (row.sequence, row.computed_before)).collect();
        let admitted = pass.admitted().iter().map(|admitted| (admitted.sequence, admitted.cached_tokens));
        assert_eq!(admitted.collect::<Vec<_>>(), new);
    }

    /// That an event says of a sequence's blocks what they hold.
    pub(crate) fn stored(&self, event: &KvEvent) {
        let KvEvent::BlockStored { sequence: Some(id), block_hashes, first_block_index, .. } = event else { return };
        let KvEvent::BlockStored { token_ids, extra_keys, lora_name, parent_block_hash, .. } = event else { return };
        let Account { request, answer, .. } = &self.accounts[id];
        let tokens = [&request.prompt.to_tokens()[..], answer].concat();
        let (block_size, first) = (self.config.kind.block_size() as usize, *first_block_index as usize);
        let blocks = first..first + block_hashes.len();
        assert_eq!(token_ids[..], tokens[blocks.start * block_size..blocks.end * block_size], "{event:?}");
        assert_eq!((lora_name, parent_block_hash.is_some()), (&request.lora_name, first > 0), "{event:?}");
        let mut expected: Vec<_> = blocks.map(|index| extra_keys_of(request, index, block_size)).collect();
        if expected.iter().all(Option::is_none) {
            expected.clear();
        }
        assert_eq!(*extra_keys, expected, "{event:?}");
    }

    /// Takes the effects of a pass that computed so many tokens, or of a settlement.
    pub(crate) fn shown(&mut self, effects: &Effects, computed_tokens: Option<u64>) {
        assert!(effects.at >= self.last_boundary, "time went back");
        self.last_boundary = effects.at;
        for output in &effects.outputs {
            let prefill = output.prefill;
            self.produced(output.sequence, output.token, effects.at, prefill);
            if let Some(reason) = output.finish {
                self.ended(output.sequence, reason);
            }
        }
        assert_eq!(effects.pass.is_some(), computed_tokens.is_some_and(|tokens| tokens > 0));
        if let (Some(pass), Some(tokens)) = (&effects.pass, computed_tokens) {
            assert_eq!(pass.pass, self.num_passes);
            assert_eq!(pass.sum_prefill_tokens + pass.num_decode_requests, tokens);
            assert_eq!(pass.prefix_cache, self.look_ups);
            assert_eq!(pass.num_queued_prefill + pass.num_queued_decode, effects.metrics.num_requests_waiting);
            self.num_passes += 1;
        }
        if computed_tokens.is_some() {
            self.prefix_cache.add(&std::mem::take(&mut self.look_ups));
        }
        let metrics = &effects.metrics;
        assert_eq!((metrics.at, metrics.num_passes), (effects.at, self.num_passes));
        assert_eq!(metrics.num_preemptions, self.num_preemptions);
        assert_eq!((metrics.prompt_tokens, metrics.generation_tokens), (self.prompt_tokens, self.generation_tokens));
        assert_eq!((metrics.prefix_cache, metrics.finished), (self.prefix_cache, self.finished));
    }

    fn produced(&mut self, id: SequenceId, token: Option<u32>, at: EngineTime, prefill: Option<PrefillStats>) {
        let account = self.accounts.get_mut(&id).expect("only what was submitted has outputs");
        assert_eq!(account.end, None, "{id} has an output after its end");
        let Some(token) = token else { return };
        assert_eq!(account.answer.get(account.produced), Some(&token), "token {} of {id}", account.produced);
        account.produced += 1;
        self.generation_tokens += 1;
        let (admitted_at, cached) = account.admitted.expect("no token without an admission");
        let first_token_at = *account.first_token_at.get_or_insert(at);
        assert!(account.arrival <= admitted_at && admitted_at <= first_token_at && first_token_at <= at);
        let block_size = self.config.kind.block_size();
        let in_full_blocks = account.num_prompt / block_size * block_size;
        let expected = PrefillStats {
            num_external_cached_tokens: 0,
            num_prompt_tokens: account.num_prompt,
            num_computed_tokens: account.num_prompt - cached,
            num_cached_tokens: cached,
            num_cache_creation_tokens: if self.caching { in_full_blocks - cached } else { 0 },
        };
        assert_eq!(prefill, (account.produced == 1).then_some(expected), "{id}");
    }

    fn ended(&mut self, id: SequenceId, reason: FinishReason) {
        let account = self.accounts.get_mut(&id).expect("only what was submitted ends");
        assert_eq!(account.end.replace(End::Shown(reason)), None, "{id} ended twice");
        if reason == FinishReason::OutOfMemory {
            let tokens = u64::from(account.num_prompt) + account.produced as u64;
            assert!(self.config.kind.blocks_for(tokens) > self.config.kind.usable_blocks(), "{id} fits the pool");
        } else {
            assert_eq!((reason, account.produced), (account.finish, account.answer.len()), "{id}");
        }
        match reason {
            FinishReason::Stop { .. } => self.finished.stop += 1,
            FinishReason::Length => self.finished.length += 1,
            FinishReason::OutOfMemory => self.finished.out_of_memory += 1,
            other => panic!("the core never says {other:?}"),
        }
    }

    /// When nothing is live: every account has its end, and a pass has reported each.
    pub(crate) fn assert_closed(&self) {
        for (id, account) in &self.accounts {
            assert!(account.end.is_some() && account.reported, "{id}: {account:?}");
        }
    }
}
