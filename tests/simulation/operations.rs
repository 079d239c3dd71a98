//! Long lists of operations that become short when one of them fails.

use std::fmt::Debug;

use proptest::prelude::*;
use proptest::strategy::{NewTree, ValueTree};
use proptest::test_runner::TestRunner;

/// Up to 300 operations; most runs are long, as what goes wrong late needs what went on before.
pub(crate) fn operations<S: Strategy>(operation: S) -> impl Strategy<Value = Vec<S::Value>>
where
    S::Value: Debug,
{
    Operations(operation)
}

#[derive(Debug)]
struct Operations<S>(S);

impl<S: Strategy> Strategy for Operations<S> {
    type Tree = Shrinking<S::Tree>;
    type Value = Vec<S::Value>;

    fn new_tree(&self, runner: &mut TestRunner) -> NewTree<Self> {
        let len = prop_oneof![1 => 1..100_usize, 4 => 240..=300_usize].new_tree(runner)?.current();
        let elements = (0..len).map(|_| self.0.new_tree(runner)).collect::<Result<Vec<_>, _>>()?;
        let left_out = vec![false; len];
        Ok(Shrinking { elements, left_out, chunk: len, at: 0, tried: Vec::new() })
    }
}

/// Leaves out whole stretches first, then shorter ones, then makes what is left simpler.
#[derive(Debug)]
struct Shrinking<T> {
    elements: Vec<T>,
    left_out: Vec<bool>,
    /// Length of the stretches that are tried; 0: single operations are made simpler.
    chunk: usize,
    /// The next stretch, or the operation that is made simpler.
    at: usize,
    /// What was left out last.
    tried: Vec<usize>,
}

impl<T: ValueTree> ValueTree for Shrinking<T> {
    type Value = Vec<T::Value>;

    fn current(&self) -> Self::Value {
        let kept = self.elements.iter().zip(&self.left_out).filter(|(_, left_out)| !**left_out);
        kept.map(|(element, _)| element.current()).collect()
    }

    fn simplify(&mut self) -> bool {
        while self.chunk > 0 {
            let stretch = self.at..(self.at + self.chunk).min(self.elements.len());
            self.at += self.chunk;
            if self.at >= self.elements.len() {
                (self.at, self.chunk) = (0, self.chunk / 2);
            }
            self.tried = stretch.filter(|&index| !self.left_out[index]).collect();
            self.tried.iter().for_each(|&index| self.left_out[index] = true);
            if !self.tried.is_empty() {
                return true;
            }
        }
        self.tried.clear();
        while self.at < self.elements.len() {
            if !self.left_out[self.at] && self.elements[self.at].simplify() {
                return true;
            }
            self.at += 1;
        }
        false
    }

    fn complicate(&mut self) -> bool {
        if self.tried.is_empty() {
            return self.at < self.elements.len() && self.elements[self.at].complicate();
        }
        self.tried.drain(..).for_each(|index| self.left_out[index] = false);
        true
    }
}
