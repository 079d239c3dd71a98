//! Names for what is in KV blocks, from the tokens alone.
//!
//! A recording does not show hashes: it names a content `(id, block index)` by the first request whose
//! tokens had it, computed or not. Contents are told apart here by what they are, so that a hash of the
//! core that stands for two of them shows as a difference: it keeps the name of the first.

use rustc_hash::FxHashMap;

use super::step::Content;
use crate::kv_event::BlockHash;
use crate::request::SequenceId;

/// A content by number.
type ContentIndex = usize;

/// What makes a full block: everything before it, the salt of a first block, and its tokens.
type Key = (Option<ContentIndex>, Option<String>, Vec<u32>);

/// All contents that any request has had.
#[derive(Debug)]
pub(super) struct Contents {
    block_size: usize,
    known: FxHashMap<Key, ContentIndex>,
    names: Vec<Content>,
    /// The contents of each sequence's full blocks, by sequence id.
    sequences: Vec<Tokens>,
    hashes: FxHashMap<BlockHash, ContentIndex>,
}

/// The tokens of one sequence as far as they matter here.
#[derive(Debug)]
struct Tokens {
    id: String,
    salt: Option<String>,
    blocks: Vec<ContentIndex>,
    /// Those after the last full block.
    rest: Vec<u32>,
}

impl Contents {
    pub(super) fn new(block_size: u32) -> Self {
        Self {
            block_size: block_size as usize,
            known: FxHashMap::default(),
            names: Vec::new(),
            sequences: Vec::new(),
            hashes: FxHashMap::default(),
        }
    }

    /// A new sequence; its id is the number of those before it.
    pub(super) fn add(&mut self, id: &str, salt: Option<&str>, prompt: &[u32]) {
        let sequence = SequenceId(self.sequences.len() as u64);
        let (id, salt) = (id.to_owned(), salt.map(str::to_owned));
        self.sequences.push(Tokens { id, salt, blocks: Vec::new(), rest: Vec::new() });
        for &token in prompt {
            self.push(sequence, token);
        }
    }

    /// One more token of a sequence.
    pub(super) fn push(&mut self, sequence: SequenceId, token: u32) {
        let tokens = &mut self.sequences[sequence.0 as usize];
        tokens.rest.push(token);
        if tokens.rest.len() < self.block_size {
            return;
        }
        let parent = tokens.blocks.last().copied();
        let salt = if parent.is_none() { tokens.salt.clone() } else { None };
        let names = &mut self.names;
        let content = *self.known.entry((parent, salt, std::mem::take(&mut tokens.rest))).or_insert_with(|| {
            names.push((tokens.id.clone(), tokens.blocks.len() as u32));
            names.len() - 1
        });
        tokens.blocks.push(content);
    }

    /// Takes down which hashes the core gave to full blocks of a sequence.
    pub(super) fn stored(&mut self, sequence: SequenceId, first_block: u32, hashes: &[BlockHash]) {
        let blocks = self.sequences[sequence.0 as usize].blocks.iter().skip(first_block as usize);
        for (&hash, &content) in hashes.iter().zip(blocks) {
            self.hashes.entry(hash).or_insert(content);
        }
    }

    /// The name of what the hash stands for; one that no recording has if it was never stored.
    pub(super) fn name(&self, hash: BlockHash) -> Content {
        let known = self.hashes.get(&hash).map(|&content| self.names[content].clone());
        known.unwrap_or_else(|| (format!("(never stored: {:016x})", hash.0), 0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_content_has_the_name_of_the_first_whose_tokens_had_it() {
        let mut contents = Contents::new(2);
        contents.add("a", None, &[1, 2, 3]);
        contents.add("b", None, &[1, 2, 3, 4, 5, 6]);
        contents.add("salted", Some("s"), &[1, 2]);
        contents.push(SequenceId(0), 4);
        contents.push(SequenceId(0), 9);
        let (a, b, salted) = (SequenceId(0), SequenceId(1), SequenceId(2));
        let hashes = [10, 11, 12].map(BlockHash);
        contents.stored(b, 0, &hashes);
        contents.stored(salted, 0, &[BlockHash(20)]);
        let name = |id: &str, block| (id.to_owned(), block);
        assert_eq!(hashes.map(|hash| contents.name(hash)), [name("a", 0), name("b", 1), name("b", 2)]);
        assert_eq!(contents.name(BlockHash(20)), name("salted", 0));
        contents.stored(a, 1, &[BlockHash(11)]);
        assert_eq!(contents.name(BlockHash(11)), name("b", 1), "the prompt of b had it before the output of a");
        contents.stored(salted, 0, &[BlockHash(10)]);
        assert_eq!(contents.name(BlockHash(10)), name("a", 0), "a hash that is given to a second content shows");
        assert_eq!(contents.name(BlockHash(99)).0, "(never stored: 0000000000000063)");
    }
}
