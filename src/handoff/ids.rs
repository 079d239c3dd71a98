//! Identities of a handoff and of one registration of it.

use std::fmt;

use uuid::Uuid;

/// One handoff of a request from a prefill engine to a decode engine, the same on both sides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize), serde(transparent))]
pub struct HandoffId(pub Uuid);

impl From<Uuid> for HandoffId {
    fn from(id: Uuid) -> Self {
        Self(id)
    }
}

impl fmt::Display for HandoffId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "handoff {}", self.0)
    }
}

/// One registration of a handoff at one engine.
///
/// An id may be registered again later, with a greater generation: that a command is stale is then a
/// comparison of two numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize, serde::Deserialize))]
pub struct HandoffKey {
    /// The handoff.
    pub id: HandoffId,
    /// Which registration of it; later ones have greater numbers.
    pub generation: u64,
}

impl HandoffKey {
    /// The registration of a handoff with this generation.
    #[must_use]
    pub const fn new(id: HandoffId, generation: u64) -> Self {
        Self { id, generation }
    }
}

impl fmt::Display for HandoffKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} generation {}", self.id, self.generation)
    }
}
