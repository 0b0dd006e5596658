//! Compares the claims of machines about the whole cluster with each other and with the outcomes
//! that clients received, and collects their leaks at the end. It knows no protocol: machines
//! report by themselves ([`Claim`], [`Machine::leaks`], [`Machine::replica_digests`]).

use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::machine::{Claim, Machine, Protocol, ReplicaDigest};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::txn::Outcome;

/// Why a run has not settled.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Unrest {
    /// There are leaks, which may still disappear.
    Left(String),
    /// Two digests of the same state differ, which never heals.
    Differs(String),
}

/// All claims of a run.
#[derive(Clone, Default, Debug)]
pub struct Watch {
    /// The leader of each term.
    leaders: OrdMap<(PartitionId, u64), NodeId>,
    /// The term of every chosen entry, by its index from 1, and the node that claimed it first.
    chosen: OrdMap<PartitionId, Vec<Option<(u64, NodeId)>>>,
    /// The decision on every attempt, and the node that claimed it first.
    decided: OrdMap<TxnId, (Outcome, NodeId)>,
    /// The outcomes that clients received.
    told: OrdMap<TxnId, Outcome>,
}

impl Watch {
    /// Records a machine's claim.
    ///
    /// # Errors
    /// If it contradicts an earlier claim.
    pub fn claim(&mut self, node: NodeId, claim: Claim) -> Result<(), String> {
        match claim {
            Claim::Leads { partition, term } => {
                let first = *self.leaders.entry((partition, term)).or_insert(node);
                if first == node {
                    return Ok(());
                }
                Err(format!("{first} and {node} both lead {partition} in term {term}"))
            }
            Claim::Chosen { partition, index, term } => self.chosen(node, partition, index, term),
            Claim::Decided { txn, outcome } => {
                let (first, whose) = *self.decided.entry(txn).or_insert((outcome, node));
                if !agree(first, outcome) {
                    return Err(format!(
                        "{txn} was decided {first} at {whose} and {outcome} at {node}"
                    ));
                }
                self.compare(txn)
            }
        }
    }

    fn chosen(
        &mut self,
        node: NodeId,
        partition: PartitionId,
        index: u64,
        term: u64,
    ) -> Result<(), String> {
        let log = self.chosen.entry(partition).or_default();
        let at = usize::try_from(index).unwrap_or(usize::MAX);
        if log.len() <= at {
            log.resize(at + 1, None);
        }
        let Some(place) = log.get_mut(at) else { return Ok(()) };
        let (first, whose) = *place.get_or_insert((term, node));
        if first == term {
            return Ok(());
        }
        Err(format!(
            "entry {index} of {partition} was chosen in term {first} by {whose} and in term {term} \
             by {node}"
        ))
    }

    /// Records an outcome that a client received, of a transaction that writes.
    ///
    /// # Errors
    /// If the decision was different.
    pub fn told(&mut self, txn: TxnId, outcome: Outcome) -> Result<(), String> {
        if outcome == Outcome::Unknown {
            return Ok(());
        }
        self.told.insert(txn, outcome);
        self.compare(txn)
    }

    /// R7: the outcome that a client received is the one that was decided.
    fn compare(&self, txn: TxnId) -> Result<(), String> {
        match (self.told.get(&txn), self.decided.get(&txn)) {
            (Some(&told), Some(&(decided, whose))) if !agree(told, decided) => {
                Err(format!("{txn}: the client learned {told}, but {whose} decided {decided}"))
            }
            (Some(_) | None, Some(_) | None) => Ok(()),
        }
    }
}

/// True if two reports of an outcome agree. The reasons for an abort may differ.
fn agree(a: Outcome, b: Outcome) -> bool {
    match (a, b) {
        (Outcome::Aborted(_), Outcome::Aborted(_)) => true,
        (Outcome::Committed(_) | Outcome::Aborted(_) | Outcome::Unknown, _) => a == b,
    }
}

/// Fails if `machine` has leaks.
///
/// # Errors
/// The leaks.
pub fn leaks<P: Protocol, M: Machine<P>>(node: NodeId, machine: &M) -> Result<(), Unrest> {
    let held = machine.leaks();
    let left: Vec<String> = held
        .into_iter()
        .filter(|&(_, count)| count > 0)
        .map(|(what, count)| format!("{count} {what}"))
        .collect();
    if left.is_empty() {
        return Ok(());
    }
    Err(Unrest::Left(format!("leaks at {node}: {}", left.join(", "))))
}

/// Replica digests seen since the leaks disappeared.
#[derive(Clone, Default, Debug)]
pub struct Copies {
    /// The first digest for each group and position, and its node.
    first: OrdMap<(PartitionId, u64), (NodeId, u64)>,
    /// Every group, and whether two digests of its state have been compared.
    compared: OrdMap<PartitionId, bool>,
}

impl Copies {
    /// Compares the current digests with each other and with earlier ones. A group that keeps
    /// appending never has all replicas at one position at the same time.
    ///
    /// # Errors
    /// If two digests at one position differ, or two digests of a group have not been compared yet.
    pub fn compare(&mut self, now: &[(NodeId, ReplicaDigest)]) -> Result<(), Unrest> {
        for &(node, ReplicaDigest { partition, position, digest, .. }) in now {
            let (first, theirs) =
                *self.first.entry((partition, position)).or_insert((node, digest));
            if theirs != digest {
                return Err(Unrest::Differs(format!(
                    "replica digests differ: {first} and {node} have different states of {partition} at position {position}"
                )));
            }
            let held =
                || now.iter().map(|(_, copy)| copy).filter(move |it| it.partition == partition);
            let furthest = held().max_by_key(|copy| copy.position);
            let is_alone = held().count() == 1 || furthest.is_some_and(|it| it.members == Some(1));
            *self.compared.entry(partition).or_default() |= is_alone || first != node;
        }
        match self.compared.iter().find(|(_, is_compared)| !**is_compared) {
            None => Ok(()),
            Some((partition, _)) => Err(Unrest::Left(format!(
                "no two replica digests of {partition} are at the same position"
            ))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::id::ClientId;
    use orthodrome_core::time::Timestamp;
    use orthodrome_core::txn::AbortReason;

    const P: PartitionId = PartitionId(3);
    const A: NodeId = NodeId(1);
    const B: NodeId = NodeId(2);

    fn decided(counter: u64, outcome: Outcome) -> Claim {
        Claim::Decided { txn: TxnId::new(ClientId(1), counter), outcome }
    }

    #[test]
    fn a_term_has_one_leader() {
        let mut watch = Watch::default();
        watch.claim(A, Claim::Leads { partition: P, term: 4 }).unwrap();
        watch.claim(A, Claim::Leads { partition: P, term: 4 }).unwrap();
        watch.claim(B, Claim::Leads { partition: P, term: 5 }).unwrap();
        watch.claim(B, Claim::Leads { partition: PartitionId(4), term: 4 }).unwrap();
        let error = watch.claim(B, Claim::Leads { partition: P, term: 4 }).unwrap_err();
        assert_eq!(error, "n1 and n2 both lead p3 in term 4");
    }

    #[test]
    fn a_place_in_a_log_holds_one_entry() {
        let mut watch = Watch::default();
        let entry = |index, term| Claim::Chosen { partition: P, index, term };
        watch.claim(A, entry(7, 2)).unwrap();
        watch.claim(A, entry(8, 3)).unwrap();
        watch.claim(B, entry(7, 2)).unwrap();
        let error = watch.claim(B, entry(8, 4)).unwrap_err();
        assert_eq!(error, "entry 8 of p3 was chosen in term 3 by n1 and in term 4 by n2");
    }

    #[test]
    fn an_attempt_is_decided_once_whatever_the_reasons_given() {
        let conflict = Outcome::Aborted(AbortReason::Conflict);
        let mut watch = Watch::default();
        watch.claim(A, decided(1, conflict)).unwrap();
        watch.claim(B, decided(1, Outcome::Aborted(AbortReason::Client))).unwrap();
        watch.claim(B, decided(2, Outcome::Committed(Timestamp(5)))).unwrap();
        for other in [conflict, Outcome::Committed(Timestamp(6))] {
            let error = watch.claim(A, decided(2, other)).unwrap_err();
            assert!(error.starts_with("c1.2 was decided committed@5 at n2 and"), "{error}");
        }
        assert!(watch.claim(A, decided(1, Outcome::Committed(Timestamp(5)))).is_err());
    }

    #[test]
    fn an_acknowledged_outcome_must_be_the_decided_one_in_any_order() {
        let (commit, abort) =
            (Outcome::Committed(Timestamp(5)), Outcome::Aborted(AbortReason::Conflict));
        let txn = TxnId::new(ClientId(1), 1);
        let mut watch = Watch::default();
        watch.told(txn, Outcome::Unknown).unwrap();
        watch.told(txn, commit).unwrap();
        assert!(watch.claim(A, decided(1, abort)).unwrap_err().contains("learned committed@5"));
        let mut watch = Watch::default();
        watch.claim(A, decided(1, commit)).unwrap();
        assert!(watch.told(txn, abort).unwrap_err().contains("n1 decided committed@5"));
        assert!(watch.told(txn, Outcome::Committed(Timestamp(6))).is_err());
        watch.told(txn, commit).unwrap();
    }

    #[test]
    fn digests_at_one_position_must_be_equal_and_compared() {
        let of = |members, position, digest| {
            let partition = P;
            ReplicaDigest { partition, position, digest, members }
        };
        let copy = |position, digest| of(None, position, digest);
        let mut copies = Copies::default();
        assert_eq!(
            copies.compare(&[(A, copy(9, 1)), (B, copy(9, 1)), (NodeId(3), copy(8, 7))]),
            Ok(())
        );
        let differs = copies.compare(&[(A, copy(10, 1)), (B, copy(10, 2))]);
        assert!(matches!(differs, Err(Unrest::Differs(_))), "{differs:?}");
        // The comparison also works if they reach the same position one after the other.
        let mut copies = Copies::default();
        let alone = copies.compare(&[(A, copy(9, 1)), (B, copy(8, 2))]);
        assert!(matches!(alone, Err(Unrest::Left(_))), "{alone:?}");
        assert_eq!(copies.compare(&[(A, copy(10, 3)), (B, copy(9, 1))]), Ok(()));
        let differs = copies.compare(&[(A, copy(11, 1)), (B, copy(10, 4))]);
        assert!(matches!(differs, Err(Unrest::Differs(_))), "{differs:?}");
        assert_eq!(Copies::default().compare(&[(A, copy(9, 1))]), Ok(()));
        // A group of one replica has nothing to compare. A former member has an old state.
        let moved = [(A, of(Some(2), 8, 1)), (B, of(Some(1), 9, 2))];
        assert_eq!(Copies::default().compare(&moved), Ok(()));
        let lagging = [(A, of(Some(1), 8, 1)), (B, of(Some(2), 9, 2))];
        assert!(Copies::default().compare(&lagging).is_err());
    }
}
