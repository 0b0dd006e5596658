//! No client is shown less than it was told, under any protocol (R11).

use orthodrome_core::machine::NO_SESSIONS;
use orthodrome_protocols::carousel::FAST;
use orthodrome_protocols::{ocean_vista, tapir};

use super::support::catch;

/// The seeds of [`super`] hold every protocol to it. Where replicas may be behind, clients that
/// forget what they were told see it, within so many seeds; `carousel.rs` has Carousel's basic
/// protocol.
const CAUGHT_WITHIN: [(&str, u64); 3] = [(FAST, 400), (tapir::NAME, 400), (ocean_vista::NAME, 400)];

#[test]
fn clients_that_forget_what_they_have_seen_are_caught() {
    for (name, within) in CAUGHT_WITHIN {
        catch(name, NO_SESSIONS, None, within);
    }
}
