//! The exploration itself. A scheduler cannot be copied, so a state is reached again by its shortest path.

use std::collections::{HashSet, VecDeque};
use std::fmt::Debug;

/// Whether an action did something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Did {
    Something,
    Nothing,
}

/// A tiny engine and what has been seen of it.
pub(crate) trait World {
    type Action: Copy + Debug + PartialEq;

    /// A hash of everything that can be seen and decides what comes next.
    fn state(&self) -> u64;

    fn act(&mut self, action: Self::Action) -> Did;

    /// Does an action and checks what must hold always.
    fn act_and_check(&mut self, action: Self::Action) -> Did;

    /// Ends everything, and checks that it has.
    fn close(&mut self);
}

/// What was explored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Explored {
    pub(crate) states: usize,
    pub(crate) transitions: usize,
}

/// How a state was reached first.
struct Node<A> {
    parent: usize,
    action: A,
}

fn replay<W: World>(nodes: &[Node<W::Action>], node: usize, new: impl Fn() -> W) -> W {
    let mut path = Vec::new();
    let mut at = node;
    while at > 0 {
        path.push(nodes[at].action);
        at = nodes[at].parent;
    }
    let mut world = new();
    for action in path.into_iter().rev() {
        world.act(action);
    }
    world
}

/// Explores until nothing new turns up. What says that it did nothing must have changed nothing, and from every
/// state everything ends.
pub(crate) fn explore<W: World>(new: impl Fn() -> W, actions: &[W::Action]) -> Explored {
    let mut nodes = vec![Node { parent: 0, action: actions[0] }];
    let mut seen = HashSet::from([new().state()]);
    let mut open = VecDeque::from([0]);
    let mut transitions = 0;
    while let Some(node) = open.pop_front() {
        let mut world = replay(&nodes, node, &new);
        let state = world.state();
        for &action in actions {
            transitions += 1;
            if world.act_and_check(action) == Did::Nothing {
                assert_eq!(world.state(), state, "{action:?} was refused or says that it did nothing");
                continue;
            }
            if seen.insert(world.state()) {
                nodes.push(Node { parent: node, action });
                open.push_back(nodes.len() - 1);
            }
            world = replay(&nodes, node, &new);
        }
        world.close();
    }
    Explored { states: seen.len(), transitions }
}
