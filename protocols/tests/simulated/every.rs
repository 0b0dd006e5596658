//! Every protocol of the registry, also one that has no tests of its own here yet.

use std::thread;

use orthodrome_protocols::registry::{self, Registered, Row, Visitor};

use super::support::{catch, hold_every_promise};

#[test]
fn a_few_seeds_of_every_protocol_pass() {
    for row in registry::rows() {
        hold_every_promise(row.name, 700_000..700_004, 4);
    }
}

struct Catch;

impl Visitor for Catch {
    type Out = ();

    fn visit<P: Registered>(self, row: &'static Row) {
        for (_, mutation, within) in P::CAUGHT_WITHIN.iter().filter(|known| known.0 == row.name) {
            catch(row.name, mutation, None, *within);
        }
    }
}

#[test]
fn mutations_are_caught_within_as_many_seeds_as_their_protocols_say() {
    thread::scope(|scope| {
        for row in registry::rows() {
            scope.spawn(move || registry::with(row.name, Catch).unwrap());
        }
    });
}
