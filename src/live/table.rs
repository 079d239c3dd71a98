//! The dispatcher's table of streams.

use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::live::route::Route;
use crate::request::SequenceId;

/// Sequences per page. Ids are a counter and outputs come in the order of admission, so that one look-up
/// of a page serves many outputs in a row, from neighbouring memory.
const PAGE: u64 = 64;

/// Sequence → route, in pages of neighbouring ids. A page without routes is used again, so the table costs
/// what the open routes need: at the worst, one page for each.
#[derive(Debug, Default)]
pub(super) struct RouteTable {
    pages: Vec<Page>,
    vacant: Vec<usize>,
    /// Page number → index in `pages`.
    index: FxHashMap<u64, usize>,
    /// The page that was looked up last: its number, and its index in `pages`.
    last: Option<(u64, usize)>,
}

#[derive(Debug)]
struct Page {
    routes: [Option<Arc<Route>>; PAGE as usize],
    used: usize,
}

impl RouteTable {
    pub(super) fn insert(&mut self, route: Arc<Route>) {
        let (number, place) = split(route.sequence);
        let pages = &mut self.pages;
        let index = *self.index.entry(number).or_insert_with(|| {
            self.vacant.pop().unwrap_or_else(|| {
                pages.push(Page { routes: [const { None }; PAGE as usize], used: 0 });
                pages.len() - 1
            })
        });
        let page = &mut self.pages[index];
        page.used += usize::from(page.routes[place].replace(route).is_none());
    }

    pub(super) fn get(&mut self, sequence: SequenceId) -> Option<&Arc<Route>> {
        let (number, place) = split(sequence);
        let index = self.page(number)?;
        self.pages[index].routes[place].as_ref()
    }

    pub(super) fn remove(&mut self, sequence: SequenceId) -> Option<Arc<Route>> {
        let (number, place) = split(sequence);
        let index = self.page(number)?;
        let page = &mut self.pages[index];
        let route = page.routes[place].take()?;
        page.used -= 1;
        if page.used == 0 {
            self.index.remove(&number);
            self.vacant.push(index);
            self.last = None;
        }
        Some(route)
    }

    fn page(&mut self, number: u64) -> Option<usize> {
        match self.last {
            Some((last, index)) if last == number => Some(index),
            _ => {
                let index = *self.index.get(&number)?;
                self.last = Some((number, index));
                Some(index)
            }
        }
    }
}

/// The number of a sequence's page, and its place in it.
fn split(sequence: SequenceId) -> (u64, usize) {
    (sequence.0 / PAGE, (sequence.0 % PAGE) as usize)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;
    use crate::live::OutputBuffering;
    use crate::live::clock::Clock;
    use crate::live::route::Routes;
    use crate::live::stop::Stop;
    use crate::output::mix;

    #[test]
    fn it_is_a_map_and_its_pages_are_used_again() {
        let routes = Routes::new(0, Clock::new(None), Arc::new(Stop::default()));
        let route = || routes.register(None, OutputBuffering::FullResponse, 1).expect("made ids differ");
        let (mut table, mut model) = (RouteTable::default(), BTreeMap::new());
        for step in 0..20_000_u64 {
            if model.len() < 100 && mix(step).is_multiple_of(2) {
                let route = route();
                model.insert(route.sequence, Arc::clone(&route));
                table.insert(route);
            }
            let sequence = SequenceId(mix(step ^ 7) % 10_000);
            assert_eq!(
                table.get(sequence).map(|route| route.sequence),
                model.get(&sequence).map(|route| route.sequence)
            );
            // The oldest goes at times, and so whole pages become vacant.
            let gone = if step.is_multiple_of(3) { model.keys().next().copied() } else { Some(sequence) };
            if let Some(gone) = gone {
                assert_eq!(table.remove(gone).is_some(), model.remove(&gone).is_some());
            }
        }
        let used: usize = table.pages.iter().map(|page| page.used).sum();
        assert_eq!((used, table.pages.len() - table.vacant.len()), (model.len(), table.index.len()));
        assert!(table.pages.len() <= 100, "{} pages", table.pages.len());
    }
}
