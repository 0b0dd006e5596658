//! What recovery may choose: the one decision function (D8, R7).

use std::collections::BTreeMap;

use orthodrome_core::id::NodeId;
use orthodrome_core::time::Timestamp;

use super::message::{Answer, Kind, Value};
use super::mutations::Mutations;

/// What recovery may choose.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Choice {
    /// This may have been decided: no other is safe.
    Only(Value),
    /// Nothing was decided, and ballot 0 never will decide. The largest stamp is safe if every
    /// answer has one, and a refusal is.
    Free(Option<Timestamp>),
}

impl Choice {
    /// What the coordinator proposes: it refuses only what nobody could tell it anything about.
    #[must_use]
    pub fn value(self) -> Value {
        match self {
            Self::Only(value) => value,
            Self::Free(Some(at)) => Value::At(at),
            Self::Free(None) => Value::Refused,
        }
    }
}

/// Chooses from the answers of f + 1 replicas to one ballot. `named` has h first; it is empty if no
/// answer has the text of the transaction, and then nobody has a stamp of ballot 0 among them.
#[must_use]
pub fn choose(
    named: &[NodeId],
    answers: &BTreeMap<NodeId, Answer>,
    mutations: Mutations,
) -> Choice {
    let accepted = answers.values().filter_map(|answer| answer.accepted);
    let best = if mutations.lowest_accepted() {
        accepted.min_by_key(|(ballot, _)| *ballot)
    } else {
        accepted.max_by_key(|(ballot, _)| *ballot)
    };
    if let Some((_, value)) = best {
        return Choice::Only(value);
    }
    let stamps: Option<Vec<Timestamp>> =
        answers.values().map(|answer| answer.stamp.map(|stamp| stamp.at)).collect();
    let free = match stamps {
        Some(stamps) => Choice::Free(stamps.into_iter().max()),
        None if mutations.no_recovery_stamp() => {
            let known = answers.values().filter_map(|answer| answer.stamp);
            Choice::Free(known.map(|stamp| stamp.at).max())
        }
        None => Choice::Free(None),
    };
    let Some((h, others)) = named.split_first() else { return free };
    if answers.contains_key(h) {
        // It has recorded nothing, and after its promise it never will (D5).
        return free;
    }
    let confirmed = |node: &NodeId| {
        let stamp = answers.get(node)?.stamp;
        stamp.filter(|stamp| stamp.kind == Kind::Confirmed || mutations.recovery_stamp_counts())
    };
    let heard = others.iter().filter(|node| answers.contains_key(node));
    let confirmed: Option<Vec<Timestamp>> =
        heard.map(|node| confirmed(node).map(|stamp| stamp.at)).collect();
    match confirmed.and_then(|stamps| stamps.into_iter().max()) {
        Some(largest) if !mutations.second_is_ignored() => Choice::Only(Value::At(largest)),
        Some(_) | None => free,
    }
}
