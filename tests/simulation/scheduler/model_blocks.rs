//! The model's KV blocks: lists that are searched from end to end, and names instead of hashes, so that no two
//! contents can be taken for one another.

use std::collections::BTreeMap;

use standin::MultimodalItem;

/// What beside the tokens tells contents apart.
#[derive(Debug, Clone, Default)]
pub(crate) struct Identity {
    pub(crate) salt: Option<&'static str>,
    pub(crate) lora: Option<&'static str>,
    pub(crate) items: Vec<MultimodalItem>,
}

/// What a name stands for: the name of the block before, the tokens, and what else identifies the block.
type Content = (Option<usize>, Vec<u32>, String);

#[derive(Debug, Clone, Default)]
pub(crate) struct Block {
    pub(crate) owners: u32,
    /// The name of its content, and how many contents were entered before this one.
    pub(crate) content: Option<(usize, usize)>,
}

#[derive(Debug)]
pub(crate) struct Blocks {
    block_size: usize,
    /// Block 0 is never handed out.
    pub(crate) all: Vec<Block>,
    /// Next to be handed out first.
    pub(crate) free: Vec<u32>,
    names: BTreeMap<Content, usize>,
    num_entered: usize,
}

impl Blocks {
    pub(crate) fn new(num_blocks: u32, block_size: u32) -> Self {
        Self {
            block_size: block_size as usize,
            all: vec![Block::default(); num_blocks as usize],
            free: (1..num_blocks).collect(),
            names: BTreeMap::new(),
            num_entered: 0,
        }
    }

    pub(crate) fn needed_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Names of the contents of full blocks.
    pub(crate) fn names(&mut self, tokens: &[u32], identity: &Identity) -> Vec<usize> {
        let mut parent = None;
        let mut names = Vec::new();
        for (index, tokens) in tokens.chunks_exact(self.block_size).enumerate() {
            let content = (parent, tokens.to_vec(), identity.of_block(index, self.block_size));
            let next = self.names.len();
            let name = *self.names.entry(content).or_insert(next);
            parent = Some(name);
            names.push(name);
        }
        names
    }

    /// The oldest block with this content.
    pub(crate) fn find(&self, name: usize) -> Option<u32> {
        let copies = (0..).zip(&self.all).filter_map(|(id, block)| block.content.map(|content| (id, content)));
        copies.filter(|(_, content)| content.0 == name).min_by_key(|(_, content)| content.1).map(|(id, _)| id)
    }

    pub(crate) fn find_prefix(&self, names: &[usize]) -> Vec<u32> {
        names.iter().map_while(|&name| self.find(name)).collect()
    }

    /// How many of them have no owner.
    pub(crate) fn count_free(&self, blocks: &[u32]) -> usize {
        blocks.iter().filter(|&&block| self.all[block as usize].owners == 0).count()
    }

    pub(crate) fn acquire(&mut self, blocks: &[u32]) {
        for &block in blocks {
            self.all[block as usize].owners += 1;
            self.free.retain(|&free| free != block);
        }
    }

    pub(crate) fn allocate(&mut self, count: usize) -> Vec<u32> {
        let blocks: Vec<u32> = self.free.drain(..count).collect();
        for &block in &blocks {
            self.all[block as usize] = Block { owners: 1, content: None };
        }
        blocks
    }

    /// Makes a sequence's blocks findable as far as they have names.
    pub(crate) fn enter(&mut self, blocks: &[u32], names: &[usize]) {
        for (&block, &name) in blocks.iter().zip(names) {
            let block = &mut self.all[block as usize];
            if block.content.is_none() {
                block.content = Some((name, self.num_entered));
                self.num_entered += 1;
            }
        }
    }

    /// Takes a sequence's blocks back, the last one first: before all others without content, behind them with one.
    pub(crate) fn release(&mut self, blocks: Vec<u32>) {
        let mut without_content = Vec::new();
        for block in blocks.into_iter().rev() {
            let state = &mut self.all[block as usize];
            state.owners -= 1;
            match (state.owners, state.content) {
                (0, None) => without_content.push(block),
                (0, Some(_)) => self.free.push(block),
                _ => {}
            }
        }
        self.free.splice(0..0, without_content);
    }

    /// Forgets every content, unless a block has an owner.
    pub(crate) fn reset(&mut self) -> bool {
        let unused = self.all.iter().all(|block| block.owners == 0);
        if unused {
            self.all.iter_mut().for_each(|block| block.content = None);
        }
        unused
    }
}

impl Identity {
    fn of_block(&self, index: usize, block_size: usize) -> String {
        let (start, end) = (index * block_size, (index + 1) * block_size);
        let mut text = format!("{:?} {:?}", self.lora, self.salt.filter(|_| index == 0));
        for item in &self.items {
            let (first, past) = (item.offset as usize, (item.offset + item.num_tokens) as usize);
            if first < end && past > start {
                text += &format!(" {} at {}", item.identifier, first as i64 - start as i64);
            }
        }
        text
    }
}
