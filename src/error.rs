//! Errors of the plain data and of the pure core. Those of the live engine are in `live`.

use crate::handoff::HandoffKey;
use crate::request::SequenceId;

/// A configuration or builder value that cannot be used.
///
/// Nothing has been started or changed when this is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {value}: {allowed}")]
pub struct ConfigError {
    /// Path of the field, as in `kind.vllm.block_size`.
    pub field: String,
    /// The value it had, cut where it is long.
    pub value: String,
    /// What is allowed.
    pub allowed: String,
}

impl ConfigError {
    pub(crate) fn new(field: impl Into<String>, value: impl ToString, allowed: impl Into<String>) -> Self {
        Self { field: field.into(), value: shown(value.to_string()), allowed: allowed.into() }
    }

    /// The same error with `prefix.` before the field's path.
    #[must_use]
    pub(crate) fn within(mut self, prefix: &str) -> Self {
        self.field = format!("{prefix}.{}", self.field);
        self
    }
}

/// Most characters of a value that an error repeats: a value may be as long as all that was read.
const SHOWN_CHARS: usize = 60;

/// A value as an error repeats it.
pub(crate) fn shown(mut value: String) -> String {
    if let Some((end, _)) = value.char_indices().nth(SHOWN_CHARS) {
        value.truncate(end);
        value.push('…');
    }
    value
}

/// The path of a JSON field as an error names it; that of the whole, and a field without a name, are `(JSON)`.
#[cfg(feature = "serde")]
pub(crate) fn json_path(path: &serde_path_to_error::Path) -> String {
    match path.to_string() {
        path if path.is_empty() || path == "." => "(JSON)".to_owned(),
        path => path,
    }
}

/// A value of a request that no engine with this configuration can serve.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    /// `prompt` holds no token. Send at least one.
    #[error("prompt is empty: at least one token is required")]
    EmptyPrompt,
    /// The request asks for no output at all. Ask for at least one token.
    #[error("output length is 0: at least one output token is required")]
    ZeroOutput,
    /// The output length is over the crate's limit.
    #[error("output length is {requested}: at most MAX_OUTPUT_TOKENS = {limit} is allowed")]
    OutputTooLong {
        /// Tokens asked for.
        requested: u64,
        /// [`crate::MAX_OUTPUT_TOKENS`].
        limit: u32,
    },
    /// The prompt leaves no room for one output token.
    #[error("prompt has {prompt_tokens} tokens: must be below max_model_len = {max_model_len}")]
    PromptTooLong {
        /// Tokens in the prompt.
        prompt_tokens: u64,
        /// The configured limit on prompt and output together.
        max_model_len: u32,
    },
    /// The prompt needs more KV blocks than the pool has.
    #[error("prompt needs {needed_blocks} KV blocks: the pool has {usable_blocks} usable ones")]
    PromptLargerThanPool {
        /// Blocks that the prompt fills, the last one perhaps in part.
        needed_blocks: u64,
        /// Blocks that can be handed out.
        usable_blocks: u64,
    },
    /// `min_output_tokens` is above the output length.
    #[error("min_output_tokens = {min}: must be at most the output length {max}")]
    MinAboveMax {
        /// `min_output_tokens`.
        min: u32,
        /// The output length.
        max: u32,
    },
    /// A multimodal item covers tokens outside the prompt.
    #[error("multimodal item {identifier:?} covers tokens {start}..{end}: the prompt has {prompt_tokens}")]
    MultimodalOutsidePrompt {
        /// The item's identifier.
        identifier: String,
        /// First token covered.
        start: u64,
        /// One past the last token covered.
        end: u64,
        /// Tokens in the prompt.
        prompt_tokens: u64,
    },
    /// There are more multimodal items than a request may have.
    #[error("multimodal has {items} items: at most MAX_MULTIMODAL_ITEMS = {limit} are allowed")]
    TooManyMultimodalItems {
        /// How many.
        items: usize,
        /// [`crate::MAX_MULTIMODAL_ITEMS`].
        limit: usize,
    },
    /// A text that is part of what names a KV block is too long. Use a name or a hash of it.
    #[error("{field} has {bytes} bytes: at most MAX_KEY_BYTES = {limit} are allowed")]
    TextTooLong {
        /// The field.
        field: &'static str,
        /// Its length.
        bytes: usize,
        /// [`crate::MAX_KEY_BYTES`].
        limit: usize,
    },
    /// The stop and end tokens cover the whole vocabulary, so no output token can be generated.
    #[error("stop_token_ids and eos_token_id cover all {vocab_size} tokens of the vocabulary: one must stay free")]
    NoTokenLeft {
        /// The configured vocabulary size.
        vocab_size: u32,
    },
}

/// Why the scheduler did not take a command. Nothing has changed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommandError {
    /// A sequence with this id is already known.
    #[error("{0} is already known to the scheduler")]
    DuplicateSequence(SequenceId),
    /// No sequence with this id is known; it may have ended.
    #[error("{0} is not known to the scheduler")]
    UnknownSequence(SequenceId),
    /// The request itself cannot be served.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The registration of the handoff is not in a state for this.
    #[error(transparent)]
    Handoff(#[from] HandoffRefusal),
    /// The engine kind does not have this.
    #[error("{0} is not supported by this engine kind")]
    NotSupported(&'static str),
}

/// Why a handoff command was refused. Nothing has changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum HandoffRefusal {
    /// A later registration of this handoff exists: this one has nothing to say any more.
    #[error("{handoff} is superseded by generation {current}")]
    Superseded {
        /// The registration of the command.
        handoff: HandoffKey,
        /// The generation that is registered now.
        current: u64,
    },
    /// A request was submitted under this registration already. Register again for another one.
    #[error("{0} has a request already")]
    AlreadySubmitted(HandoffKey),
    /// The command is for the other side of a handoff.
    #[error("{0} is a destination, and the command is for a source")]
    NotASource(HandoffKey),
    /// The command is for the other side of a handoff.
    #[error("{0} is a source, and the command is for a destination")]
    NotADestination(HandoffKey),
    /// The source has not ended yet, so there is nothing to release. Wait for
    /// [`crate::HandoffFact::SourceHeld`], or cancel it.
    #[error("the source of {0} is not held yet")]
    NotHeld(HandoffKey),
    /// The destination has no blocks yet. Wait for [`crate::HandoffFact::DestinationReserved`].
    #[error("the destination of {0} is not reserved yet")]
    NotReserved(HandoffKey),
    /// The destination was activated, or its transfer was reported as failed, before.
    #[error("the destination of {0} is active already")]
    AlreadyActive(HandoffKey),
    /// There is no such destination: it is over, or none was submitted.
    #[error("there is no destination of {0}")]
    NoDestination(HandoffKey),
}
