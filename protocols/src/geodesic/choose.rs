//! What recovery may choose: the one decision function (D8, R7).

use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::OrdMap;
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
/// answer has the text of the transaction, and then nobody has a stamp of ballot 0 among them. With
/// `is_direct` all replicas got the transaction from its gateway.
#[must_use]
pub fn choose(
    (named, is_direct): (&[NodeId], bool),
    answers: &OrdMap<NodeId, Answer>,
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
    // The gateway may have learned this (D9).
    let equal = equal_stamps(answers)
        .filter(|_| is_direct && !mutations.equal_stamps_are_ignored())
        .map(|at| Choice::Only(Value::At(at)));
    if answers.contains_key(h) {
        // It has recorded nothing, and after its promise it never will (D5).
        return equal.unwrap_or(free);
    }
    let confirmed = |node: &NodeId| {
        let stamp = answers.get(node)?.stamp;
        stamp.filter(|stamp| match stamp.kind {
            Kind::Confirmed => true,
            Kind::Recovery => mutations.recovery_stamp_counts(),
            Kind::Direct => mutations.direct_stamp_counts(),
        })
    };
    let heard = others.iter().filter(|node| answers.contains_key(node));
    let confirmed: Option<Vec<Timestamp>> =
        heard.map(|node| confirmed(node).map(|stamp| stamp.at)).collect();
    match confirmed.and_then(|stamps| stamps.into_iter().max()) {
        Some(largest) if !mutations.second_is_ignored() => Choice::Only(Value::At(largest)),
        Some(_) | None => equal.unwrap_or(free),
    }
}

/// The stamp of ballot 0 that all answers have, if they have the same.
fn equal_stamps(answers: &OrdMap<NodeId, Answer>) -> Option<Timestamp> {
    let of = |answer: &Answer| answer.stamp.filter(|stamp| stamp.kind.is_of_ballot_zero());
    let mut stamps = answers.values().map(|answer| of(answer).map(|stamp| stamp.at));
    let first = stamps.next()??;
    stamps.all(|stamp| stamp == Some(first)).then_some(first)
}

#[cfg(test)]
mod tests {
    use super::super::message::{Ballot, Stamp};
    use super::*;

    const H: NodeId = NodeId(1);
    const Y: NodeId = NodeId(2);
    const Z: NodeId = NodeId(3);

    fn stamped(at: u64, kind: Kind) -> Answer {
        Answer { stamp: Some(Stamp { at: Timestamp(at), kind }), ..Answer::default() }
    }

    fn accepted(round: u32, value: Value) -> Answer {
        let ballot = Ballot { round, ..Ballot::default() };
        Answer { accepted: Some((ballot, value)), ..stamped(5, Kind::Recovery) }
    }

    fn choice(answers: &[(NodeId, Answer)]) -> Choice {
        let answers = answers.iter().cloned().collect();
        choose((&[H, Y], false), &answers, Mutations::default())
    }

    fn direct(answers: &[(NodeId, Answer)]) -> Choice {
        let answers = answers.iter().cloned().collect();
        choose((&[H, Y], true), &answers, Mutations::default())
    }

    #[test]
    fn the_accepted_value_of_the_highest_ballot_wins() {
        let low = accepted(1, Value::At(Timestamp(9)));
        let high = accepted(2, Value::Refused);
        assert_eq!(choice(&[(Y, low), (Z, high)]), Choice::Only(Value::Refused));
        let record = accepted(0, Value::At(Timestamp(7)));
        let answers = [(H, record), (Z, stamped(9, Kind::Recovery))];
        assert_eq!(choice(&answers), Choice::Only(Value::At(Timestamp(7))));
    }

    #[test]
    fn without_h_the_confirmed_stamp_of_y_may_have_been_recorded() {
        let z = stamped(9, Kind::Recovery);
        let only = choice(&[(Y, stamped(6, Kind::Confirmed)), (Z, z.clone())]);
        assert_eq!(only, Choice::Only(Value::At(Timestamp(6))));
        // A recovery stamp counts for nobody (D6).
        let free = choice(&[(Y, stamped(6, Kind::Recovery)), (Z, z.clone())]);
        assert_eq!(free, Choice::Free(Some(Timestamp(9))));
        // After its promise h records nothing (D5).
        let free = choice(&[(H, stamped(4, Kind::Confirmed)), (Z, z)]);
        assert_eq!(free.value(), Value::At(Timestamp(9)));
    }

    #[test]
    fn what_somebody_has_not_stamped_is_refused() {
        let free = choice(&[(H, Answer::default()), (Z, stamped(9, Kind::Recovery))]);
        assert_eq!((free, free.value()), (Choice::Free(None), Value::Refused));
    }

    #[test]
    fn in_direct_mode_equal_stamps_may_have_been_learned() {
        let at = |at: u64| Choice::Only(Value::At(Timestamp(at)));
        let (h, y, z) = (Kind::Confirmed, Kind::Direct, Kind::Direct);
        assert_eq!(direct(&[(H, stamped(4, h)), (Z, stamped(4, z))]), at(4));
        assert_eq!(direct(&[(Y, stamped(4, y)), (Z, stamped(4, z))]), at(4));
        // The third one cannot have the same as both.
        let free = Choice::Free(Some(Timestamp(6)));
        assert_eq!(direct(&[(H, stamped(4, h)), (Z, stamped(6, z))]), free);
        assert_eq!(direct(&[(Y, stamped(6, y)), (Z, stamped(4, z))]), free);
        // A recovery stamp was never told to the gateway (D6).
        let free = Choice::Free(Some(Timestamp(4)));
        assert_eq!(direct(&[(H, stamped(4, h)), (Z, stamped(4, Kind::Recovery))]), free);
        // h may have recorded what y has confirmed, whatever z says.
        assert_eq!(direct(&[(Y, stamped(5, Kind::Confirmed)), (Z, stamped(7, z))]), at(5));
        // Without direct mode the gateway learns from nobody but h.
        let choice = choice(&[(H, stamped(4, h)), (Z, stamped(4, z))]);
        assert_eq!(choice, free);
    }

    /// f = 2: of three named replicas besides h, two are among any three answers without h.
    #[test]
    fn of_five_the_largest_confirmed_stamp_of_those_named_is_chosen() {
        let named = [H, NodeId(2), NodeId(3), NodeId(4)];
        let answers = [
            (NodeId(2), stamped(6, Kind::Confirmed)),
            (NodeId(4), stamped(8, Kind::Confirmed)),
            (NodeId(5), stamped(20, Kind::Recovery)),
        ];
        let chosen = choose((&named, false), &answers.into(), Mutations::default());
        assert_eq!(chosen, Choice::Only(Value::At(Timestamp(8))));
    }
}
