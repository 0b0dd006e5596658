//! The guarantees that a run must keep, given its faults. `sim` and `swarm` both decide it here.

use orthodrome_core::machine::Protocol;
use orthodrome_core::time::Time;
use orthodrome_eval::checker::Model;

use crate::fault::Schedule;

/// The consistency model for checking a history of `P` under `schedule`, if the protocol claims
/// `claimed` without faults. If clocks break their bound, protocols that need clocks
/// ([`Protocol::NEEDS_CLOCKS`]) keep serializability, and the others keep their full claim.
#[must_use]
pub fn model_under<P: Protocol>(claimed: Model, schedule: &Schedule) -> Model {
    if P::NEEDS_CLOCKS && schedule.breaks_clocks() { Model::Serializable } else { claimed }
}

/// A disk lost writes that it had reported as durable. No protocol here promises anything after
/// that. So the run ends at this moment, and only its earlier part is checked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Beyond {
    /// When the writes were lost.
    pub at: Time,
    /// Which node lost how many writes, and how.
    pub detail: String,
}
