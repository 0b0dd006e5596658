//! What a run must keep, given what went wrong in it. `sim` and `swarm` both decide it here.

use orthodrome_core::machine::Protocol;
use orthodrome_core::time::Time;
use orthodrome_eval::checker::Model;

use crate::fault::Schedule;

/// The consistency model that a history of `P` is held to under `schedule`, if `claimed` is what the
/// protocol claims without faults. Clocks that break their bound leave serializability to protocols
/// whose strict serializability needs clocks ([`Protocol::NEEDS_CLOCKS`]), and lower nothing for the
/// others.
#[must_use]
pub fn model_under<P: Protocol>(claimed: Model, schedule: &Schedule) -> Model {
    if P::NEEDS_CLOCKS && schedule.breaks_clocks() { Model::Serializable } else { claimed }
}

/// A disk lost writes that it had reported durable. No protocol here promises anything after that,
/// so a run ends at this moment, and only what happened before is judged.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Beyond {
    /// When the writes were lost.
    pub at: Time,
    /// Which node lost how many writes, and how.
    pub detail: String,
}
