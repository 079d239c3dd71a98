//! Requests: what a caller asks an engine to do.

use std::fmt;
use std::sync::Arc;

use uuid::Uuid;

use crate::config::EngineConfig;
use crate::error::RequestError;
use crate::time::EngineTime;

/// The longest output that can be asked for, in tokens.
///
/// Ten times the longest context window that is served today; it exists so that a length read from
/// the network cannot make a queue of four billion places.
pub const MAX_OUTPUT_TOKENS: u32 = 10_000_000;

/// The most multimodal items of a request: a power of two above vLLM's own default limit of 999 (`limit_mm_per_prompt`).
///
/// Every block of a prompt is held against every item of it.
pub const MAX_MULTIMODAL_ITEMS: usize = 1024;

/// The most bytes of a text that is part of what names a KV block (`cache_salt`, `lora_name`, the identifier of a
/// multimodal item): the longest path of a Linux file, for adapters that are named by theirs.
///
/// A prompt's adapter is hashed with each of its blocks.
pub const MAX_KEY_BYTES: usize = 4096;

/// Tokens that are made at a time where a lazy prompt is walked through.
const WALKED_TOKENS: usize = 1024;

/// A request inside one engine: a counter given at the edge, never reused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct SequenceId(pub u64);

impl fmt::Display for SequenceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// Prompt tokens that are made when asked for, for prompts too large or too many to hold.
///
/// An implementation must be pure: the same range always gives the same tokens, and the length stays. One that
/// names another length later is held to one between 1 and the limit of the engine; one that panics ends whatever
/// called it, a live engine included.
pub trait PromptSource: fmt::Debug + Send + Sync {
    /// Tokens in the prompt.
    fn num_tokens(&self) -> usize;

    /// Writes the tokens at `start..start + out.len()` into `out`; the range lies within the prompt.
    fn fill(&self, start: usize, out: &mut [u32]);

    /// A name for the tokens at `start..start + len`, where the source has one: an engine then names a KV
    /// block after it, and does not make the tokens for that.
    ///
    /// Equal keys of ranges of one length must mean equal tokens, and whoever has the same tokens must give
    /// the same key. An engine takes a prompt without keys as different content, also where its tokens are
    /// the same. So keys are for workloads in which all prompts with common prefixes come from such sources.
    fn content_key(&self, start: usize, len: usize) -> Option<u64> {
        let _ = (start, len);
        None
    }
}

/// The tokens of a prompt. Cloning shares them.
#[derive(Debug, Clone)]
pub enum Prompt {
    /// Held in memory.
    Tokens(Arc<[u32]>),
    /// Made when asked for.
    Lazy(Arc<dyn PromptSource>),
}

impl Prompt {
    /// Tokens in the prompt.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::Tokens(tokens) => tokens.len(),
            Self::Lazy(source) => source.num_tokens(),
        }
    }

    /// Whether the prompt has no token.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes the tokens at `start..start + out.len()` into `out`.
    ///
    /// # Panics
    /// If the range does not lie within the prompt.
    pub fn fill(&self, start: usize, out: &mut [u32]) {
        let len = self.len();
        let lies_within = start.checked_add(out.len()).is_some_and(|end| end <= len);
        assert!(lies_within, "prompt range {start}+{} of {len}", out.len());
        self.fill_within(start, out);
    }

    /// The same for a range that lies within the length that the prompt was checked with, whatever a lazy one says now.
    pub(crate) fn fill_within(&self, start: usize, out: &mut [u32]) {
        match self {
            Self::Tokens(tokens) => out.copy_from_slice(&tokens[start..start + out.len()]),
            Self::Lazy(source) => source.fill(start, out),
        }
    }

    /// The key of a range of a lazy prompt ([`PromptSource::content_key`]).
    pub(crate) fn content_key(&self, start: usize, len: usize) -> Option<u64> {
        match self {
            Self::Tokens(_) => None,
            Self::Lazy(source) => source.content_key(start, len),
        }
    }

    /// All tokens, made now if the prompt is lazy: 4 bytes for each that its source claims to have. Ask for
    /// [`Prompt::len`] first where the source is not one's own.
    #[must_use]
    pub fn to_tokens(&self) -> Arc<[u32]> {
        match self {
            Self::Tokens(tokens) => Arc::clone(tokens),
            Self::Lazy(source) => {
                let mut tokens = vec![0; source.num_tokens()];
                source.fill(0, &mut tokens);
                tokens.into()
            }
        }
    }
}

impl PartialEq for Prompt {
    /// Prompts are equal if their tokens are. Of lazy ones a few are made at a time.
    fn eq(&self, other: &Self) -> bool {
        self.len() == other.len()
            && match (self, other) {
                (Self::Tokens(left), Self::Tokens(right)) => left == right,
                _ => self.walk().eq(other.walk()),
            }
    }
}

impl Eq for Prompt {}

impl Prompt {
    /// All tokens, a few made at a time.
    fn walk(&self) -> impl Iterator<Item = u32> + '_ {
        let len = self.len();
        (0..len).step_by(WALKED_TOKENS).flat_map(move |start| {
            let mut tokens = vec![0; WALKED_TOKENS.min(len - start)];
            self.fill(start, &mut tokens);
            tokens
        })
    }
}

impl From<Vec<u32>> for Prompt {
    fn from(tokens: Vec<u32>) -> Self {
        Self::Tokens(tokens.into())
    }
}

impl From<&[u32]> for Prompt {
    fn from(tokens: &[u32]) -> Self {
        Self::Tokens(tokens.into())
    }
}

impl From<Arc<[u32]>> for Prompt {
    fn from(tokens: Arc<[u32]>) -> Self {
        Self::Tokens(tokens)
    }
}

#[cfg(feature = "serde")]
impl serde::Serialize for Prompt {
    /// As the list of all tokens.
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.walk())
    }
}

#[cfg(feature = "serde")]
impl<'de> serde::Deserialize<'de> for Prompt {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Ok(Self::Tokens(Arc::deserialize(deserializer)?))
    }
}

/// Which tokens a request produces.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum OutputPlan {
    /// Tokens from the engine's seed, the request's id and the position
    /// ([`crate::TokenGenerator`]); the request ends by length.
    #[default]
    Generated,
    /// Exactly these tokens. Their number is the output length, whatever `max_output_tokens` says;
    /// a stop or end token among them still stops.
    Tokens(Arc<[u32]>),
}

/// A multimodal item (an image, say) that covers some tokens of the prompt.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct MultimodalItem {
    /// What the item is; equal identifiers mean equal content.
    pub identifier: Arc<str>,
    /// First prompt token it covers.
    pub offset: u32,
    /// How many prompt tokens it covers.
    pub num_tokens: u32,
}

/// How a reused prefix shows in the KV events (vLLM's `kv_cache_report_mode`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(rename_all = "snake_case"))]
pub enum KvCacheReportMode {
    /// Reused blocks are not reported again.
    #[default]
    Incremental,
    /// Every look-up reports the blocks it reused once more.
    Full,
}

/// What a caller submits.
///
/// `Request::new(prompt, max_output_tokens)` and the `with_…` methods cover the common cases; all
/// fields are public.
#[derive(Debug, Clone, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(deny_unknown_fields))]
#[non_exhaustive]
pub struct Request {
    /// The caller's id, unique among active requests; `None`: the engine makes one.
    #[cfg_attr(feature = "serde", serde(default))]
    pub id: Option<Uuid>,
    /// The prompt, 1 token to `max_model_len - 1`.
    pub prompt: Prompt,
    /// Output tokens to produce, 1 to [`MAX_OUTPUT_TOKENS`]; `None`: up to `max_model_len`.
    #[cfg_attr(feature = "serde", serde(default))]
    pub max_output_tokens: Option<u32>,
    /// Which tokens to produce.
    #[cfg_attr(feature = "serde", serde(default))]
    pub output: OutputPlan,
    /// When the request arrives; `None`: when it is sent. An arrival in the future is waited for.
    #[cfg_attr(feature = "serde", serde(default))]
    pub arrival: Option<EngineTime>,
    /// Priority, where the engine schedules by it. The smaller value goes first with vLLM, the larger one
    /// with SGLang ([`crate::SglangConfig::schedule_low_priority_values_first`] turns that round).
    #[cfg_attr(feature = "serde", serde(default))]
    pub priority: i32,
    /// Separates this request's prefix cache from that of other salts.
    #[cfg_attr(feature = "serde", serde(default))]
    pub cache_salt: Option<Arc<str>>,
    /// The LoRA adapter to serve the request with; adapters do not share KV blocks.
    #[cfg_attr(feature = "serde", serde(default))]
    pub lora_name: Option<Arc<str>>,
    /// Multimodal items in the prompt; blocks that they overlap are shared only among equal items.
    #[cfg_attr(feature = "serde", serde(default))]
    pub multimodal: Vec<MultimodalItem>,
    /// Tokens that end the output.
    #[cfg_attr(feature = "serde", serde(default))]
    pub stop_token_ids: Vec<u32>,
    /// The end token; `None`: there is none.
    #[cfg_attr(feature = "serde", serde(default))]
    pub eos_token_id: Option<u32>,
    /// The end token does not end the output.
    #[cfg_attr(feature = "serde", serde(default))]
    pub ignore_eos: bool,
    /// vLLM's `min_tokens`: the repetition check starts after so many. The scheduler does not hold
    /// back a stop token before it; generated tokens hold none anyway, an explicit plan is taken as it is.
    #[cfg_attr(feature = "serde", serde(default))]
    pub min_output_tokens: u32,
    /// Compute the whole prompt even where its prefix is cached.
    #[cfg_attr(feature = "serde", serde(default))]
    pub skip_reading_prefix_cache: bool,
    /// How a reused prefix shows in the KV events (vLLM kind).
    #[cfg_attr(feature = "serde", serde(default))]
    pub kv_cache_report_mode: KvCacheReportMode,
}

impl Request {
    /// A request for `max_output_tokens` generated tokens after `prompt`.
    #[must_use]
    pub fn new(prompt: impl Into<Prompt>, max_output_tokens: u32) -> Self {
        Self {
            id: None,
            prompt: prompt.into(),
            max_output_tokens: Some(max_output_tokens),
            output: OutputPlan::Generated,
            arrival: None,
            priority: 0,
            cache_salt: None,
            lora_name: None,
            multimodal: Vec::new(),
            stop_token_ids: Vec::new(),
            eos_token_id: None,
            ignore_eos: false,
            min_output_tokens: 0,
            skip_reading_prefix_cache: false,
            kv_cache_report_mode: KvCacheReportMode::Incremental,
        }
    }

    /// Sets the caller's id.
    #[must_use]
    pub fn with_id(mut self, id: Uuid) -> Self {
        self.id = Some(id);
        self
    }

    /// Sets the exact output tokens.
    #[must_use]
    pub fn with_output_tokens(mut self, tokens: impl Into<Arc<[u32]>>) -> Self {
        self.output = OutputPlan::Tokens(tokens.into());
        self
    }

    /// Sets the arrival.
    #[must_use]
    pub fn with_arrival(mut self, arrival: EngineTime) -> Self {
        self.arrival = Some(arrival);
        self
    }

    /// Sets the priority.
    #[must_use]
    pub fn with_priority(mut self, priority: i32) -> Self {
        self.priority = priority;
        self
    }

    /// The part of a request that is handed over which its prefill engine serves: the prompt, and one token.
    #[must_use]
    pub fn prefill_part(mut self) -> Self {
        self.max_output_tokens = Some(1);
        self.min_output_tokens = 0;
        if let OutputPlan::Tokens(tokens) = &mut self.output {
            *tokens = tokens.iter().copied().take(1).collect();
        }
        self
    }

    /// How many tokens the request asks for: the plan's length if there is one, else
    /// `max_output_tokens`, else what `max_model_len` leaves after the prompt.
    #[must_use]
    pub fn output_length(&self, max_model_len: u32) -> u64 {
        match (&self.output, self.max_output_tokens) {
            (OutputPlan::Tokens(tokens), _) => tokens.len() as u64,
            (OutputPlan::Generated, Some(max)) => u64::from(max),
            (OutputPlan::Generated, None) => u64::from(max_model_len).saturating_sub(self.prompt.len() as u64),
        }
    }

    /// How many tokens it can produce at the most: [`Request::output_length`], cut by `max_model_len`.
    #[must_use]
    pub fn output_limit(&self, max_model_len: u32) -> u32 {
        let room = u64::from(max_model_len).saturating_sub(self.prompt.len() as u64);
        // `room` is at most a u32, so the minimum is one too.
        self.output_length(max_model_len).min(room) as u32
    }

    /// The end token unless it is ignored.
    pub(crate) fn effective_eos(&self) -> Option<u32> {
        self.eos_token_id.filter(|_| !self.ignore_eos)
    }

    /// The stop and end tokens, sorted, without repeats: what a generator must not produce by accident.
    /// An ignored end token is among them, as a model that is told to go on still ends nowhere.
    pub(crate) fn forbidden_tokens(&self) -> Vec<u32> {
        let mut tokens: Vec<u32> = self.stop_token_ids.iter().copied().chain(self.eos_token_id).collect();
        tokens.sort_unstable();
        tokens.dedup();
        tokens
    }

    /// Checks the request against an engine's configuration, as the live engine does before it
    /// registers anything. A zero output length is checked by the caller, who may allow it.
    ///
    /// # Errors
    /// The first value that is out of range.
    pub fn validate(&self, config: &EngineConfig) -> Result<(), RequestError> {
        self.validate_prompt(config.max_model_len)?;
        let prompt_tokens = self.prompt.len() as u64;
        let max_model_len = config.max_model_len;
        let (needed_blocks, usable_blocks) = (config.kind.blocks_to_admit(prompt_tokens), config.kind.usable_blocks());
        if needed_blocks > usable_blocks {
            return Err(RequestError::PromptLargerThanPool { needed_blocks, usable_blocks });
        }
        let requested = self.output_length(max_model_len);
        if requested > u64::from(MAX_OUTPUT_TOKENS) {
            return Err(RequestError::OutputTooLong { requested, limit: MAX_OUTPUT_TOKENS });
        }
        if u64::from(self.min_output_tokens) > requested {
            return Err(RequestError::MinAboveMax { min: self.min_output_tokens, max: requested as u32 });
        }
        self.validate_tokens(config)
    }

    /// Checks only what would make the pure core panic or never end.
    ///
    /// # Errors
    /// The first value that is out of range.
    pub(crate) fn validate_core(&self, config: &EngineConfig) -> Result<(), RequestError> {
        self.validate_prompt(config.max_model_len)?;
        if self.output_length(config.max_model_len) == 0 {
            return Err(RequestError::ZeroOutput);
        }
        self.validate_vocabulary(config)
    }

    fn validate_prompt(&self, max_model_len: u32) -> Result<(), RequestError> {
        match self.prompt.len() as u64 {
            0 => Err(RequestError::EmptyPrompt),
            prompt_tokens if prompt_tokens >= u64::from(max_model_len) => {
                Err(RequestError::PromptTooLong { prompt_tokens, max_model_len })
            }
            _ => Ok(()),
        }
    }

    fn validate_tokens(&self, config: &EngineConfig) -> Result<(), RequestError> {
        key_length("cache_salt", self.cache_salt.as_ref())?;
        key_length("lora_name", self.lora_name.as_ref())?;
        if self.multimodal.len() > MAX_MULTIMODAL_ITEMS {
            let (items, limit) = (self.multimodal.len(), MAX_MULTIMODAL_ITEMS);
            return Err(RequestError::TooManyMultimodalItems { items, limit });
        }
        let prompt_tokens = self.prompt.len() as u64;
        for item in &self.multimodal {
            key_length("multimodal.identifier", Some(&item.identifier))?;
            let (start, end) = (u64::from(item.offset), u64::from(item.offset) + u64::from(item.num_tokens));
            if end > prompt_tokens || item.num_tokens == 0 {
                let identifier = item.identifier.to_string();
                return Err(RequestError::MultimodalOutsidePrompt { identifier, start, end, prompt_tokens });
            }
        }
        self.validate_vocabulary(config)
    }

    fn validate_vocabulary(&self, config: &EngineConfig) -> Result<(), RequestError> {
        let forbidden = self.forbidden_tokens();
        let in_vocabulary = forbidden.partition_point(|&token| token < config.vocab_size);
        if self.output == OutputPlan::Generated && in_vocabulary as u64 >= u64::from(config.vocab_size) {
            return Err(RequestError::NoTokenLeft { vocab_size: config.vocab_size });
        }
        Ok(())
    }
}

/// Refuses a text that is too long to be part of a block's name.
fn key_length(field: &'static str, text: Option<&Arc<str>>) -> Result<(), RequestError> {
    match text.map(|text| text.len()) {
        Some(bytes) if bytes > MAX_KEY_BYTES => Err(RequestError::TextTooLong { field, bytes, limit: MAX_KEY_BYTES }),
        _ => Ok(()),
    }
}
