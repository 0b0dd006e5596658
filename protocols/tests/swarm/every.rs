//! Every protocol of the registry, also one that has no tests of its own here yet.

use orthodrome_protocols::registry;

use super::support::hold_every_promise;

#[test]
fn a_few_seeds_of_every_protocol_hold_every_promise() {
    for row in registry::rows() {
        hold_every_promise(row.name, 700_000..700_004, 4);
    }
}
