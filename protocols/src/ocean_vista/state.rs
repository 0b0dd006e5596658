//! What a node's replicas remember: transactions above their Rwatermark, and names.

use std::sync::Arc;

use orthodrome_core::id::{ClientId, Content, PartitionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::Outcome;
use orthodrome_core::{Wire, WireError};

use super::message::{Change, FLOOR, Functor, NAME, Output};
use crate::acknowledged::{advance, below};

/// How far a transaction has come at a replica (§4.1).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Wire)]
pub enum Phase {
    /// It is stored.
    Tentative,
    /// A majority of the replicas of each of its partitions has stored it.
    Finalized,
    /// It is aborted, and never accepted again in this ballot.
    Aborted,
}

/// A transaction as a node holds it.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Image {
    /// What it does.
    pub functor: Arc<Functor>,
    /// The life of its coordinator.
    pub incarnation: u32,
    /// The ballot in which it was stored or aborted.
    pub ballot: u64,
    /// How far it has come.
    pub phase: Phase,
    /// What it comes to, if that is known.
    pub output: Option<Arc<Output>>,
}

/// What a name stands for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
#[wire(check = "Fate::check")]
pub enum Fate {
    /// It is not accepted from its coordinator; if final, from nobody.
    Refused {
        /// f + 1 replicas had refused it.
        is_final: bool,
    },
    /// It is stored, or aborted, under this version number.
    At,
    /// It is over, everywhere.
    Ended(Outcome),
}

impl Fate {
    fn check(&self) -> Result<(), WireError> {
        match self {
            Self::Ended(outcome) => outcome.check_decided(),
            Self::Refused { .. } | Self::At => Ok(()),
        }
    }
}

/// What all attempts at a transaction have in common. Those with different contents do not count as
/// attempts at one transaction.
pub type Named = (ClientId, u64, Content);

/// The name of this transaction.
#[must_use]
pub fn named(txn: TxnId) -> Named {
    (txn.client, txn.counter, txn.content)
}

/// The latest attempt at a transaction that a node has heard of.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Wire)]
pub struct Name {
    /// The attempt.
    pub attempt: u32,
    /// Its version number; of one that was refused before it had any, when that was.
    pub ts: Timestamp,
    /// What it stands for.
    pub fate: Fate,
}

/// The durable state of a node's replicas, but for settled versions.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct State {
    /// Transactions that are not settled.
    pub pending: OrdMap<Timestamp, Image>,
    /// Transactions by name (R1, R6).
    pub names: OrdMap<Named, Name>,
    /// Clients know the outcome of everything below, as of the version that said so (R6). Their
    /// names are kept until that version is settled and the next one comes.
    pub acknowledged: OrdMap<ClientId, (u64, Timestamp)>,
    /// The least of the partitions' Rwatermarks: what is below is settled, as far as it is
    /// computed.
    pub settled: Timestamp,
    /// Versions that others at or below this replace may be gone (V11).
    pub collected: Timestamp,
    /// Partitions of which a peer's settled versions were copied beyond [`State::settled`], and how
    /// far.
    pub copied: OrdMap<PartitionId, Timestamp>,
    /// Of each client, the counter below which names were forgotten because they were over for
    /// longer than the retention: nobody here can tell any more what became of them.
    pub forgotten: OrdMap<ClientId, u64>,
}

impl State {
    /// Carries out a durable change, now or when the node starts again.
    pub fn apply(&mut self, change: &Change) {
        match change {
            Change::Write { ts, ballot, incarnation, functor } => {
                let output = functor
                    .is_write_only()
                    .then(|| Arc::new(functor.execute(&orthodrome_core::txn::Reads::new())));
                let output = self.pending.remove(ts).and_then(|held| held.output).or(output);
                // Whoever takes over writes what may have been stored, whatever was refused since.
                self.name(functor, *ts, *ballot > 0);
                let image = Image {
                    functor: functor.clone(),
                    incarnation: *incarnation,
                    ballot: *ballot,
                    phase: Phase::Tentative,
                    output,
                };
                self.pending.insert(*ts, image);
            }
            Change::Finalize(ts) => {
                if let Some(image) = self.pending.get_mut(ts) {
                    image.phase = Phase::Finalized;
                }
            }
            Change::Abort { ts, ballot, incarnation, functor } => {
                self.name(functor, *ts, false);
                let image = Image {
                    functor: functor.clone(),
                    incarnation: *incarnation,
                    ballot: *ballot,
                    phase: Phase::Aborted,
                    output: None,
                };
                self.pending.insert(*ts, image);
            }
            Change::Resolve { ts, output } => {
                if let Some(image) = self.pending.get_mut(ts) {
                    image.output.get_or_insert_with(|| output.clone());
                }
            }
            Change::Refuse { txn, is_final, at } => {
                let fate = Fate::Refused { is_final: *is_final };
                let name = Name { attempt: txn.attempt, ts: *at, fate };
                self.names.insert(named(*txn), name);
            }
            Change::Names(names) => {
                for (name, told) in names {
                    if self.is_news(*name, told) {
                        self.names.insert(*name, *told);
                    }
                }
            }
            Change::Adopt { ts, image } => {
                self.name(&image.functor, *ts, image.phase != Phase::Aborted);
                self.pending.insert(*ts, image.clone());
            }
            Change::Forget(clients) => {
                for &(client, below) in clients {
                    advance(&mut self.forgotten, client, below);
                }
            }
        }
    }

    /// Takes in another piece of a checkpoint.
    pub fn extend(&mut self, piece: Self) {
        let Self { pending, names, acknowledged, settled, collected, copied, forgotten } = piece;
        self.pending.extend(pending);
        self.names.extend(names);
        self.acknowledged.extend(acknowledged);
        self.settled = self.settled.max(settled);
        self.collected = self.collected.max(collected);
        self.copied.extend(copied);
        self.forgotten.extend(forgotten);
    }

    /// The state in pieces of about `bytes` each, for a checkpoint: no record may be longer than a
    /// limit, however much the node holds. A piece exceeds `bytes` by one transaction at most.
    #[must_use]
    pub fn pieces(&self, bytes: usize) -> Vec<Self> {
        let Self { pending, names, acknowledged, settled, collected, copied, forgotten } = self;
        let (settled, collected, copied) = (*settled, *collected, copied.clone());
        let mut pieces = Pieces { bytes, size: 0, done: Vec::new(), piece: Self::default() };
        pieces.piece = Self { settled, collected, copied, ..Self::default() };
        for (&ts, image) in pending {
            pieces.next(10 + image.size()).pending.insert(ts, image.clone());
        }
        for (&name, &held) in names {
            pieces.next(NAME).names.insert(name, held);
        }
        for (&client, &held) in acknowledged {
            pieces.next(FLOOR + 9).acknowledged.insert(client, held);
        }
        for (&client, &below) in forgotten {
            pieces.next(FLOOR).forgotten.insert(client, below);
        }
        pieces.done.push(pieces.piece);
        pieces.done
    }

    /// Notes the name of a transaction that is stored or aborted here. The first version number
    /// under which one is heard of is its own; others that have it are aborted, unless all know
    /// better.
    fn name(&mut self, functor: &Functor, ts: Timestamp, is_certain: bool) {
        let TxnId { client, counter, attempt, content: _ } = functor.txn;
        let held = self.names.get(&named(functor.txn));
        // The tombstone of a late copy says nothing of what was forgotten.
        let is_told = is_certain || held.is_some() || !self.is_too_old(client, counter);
        let is_news =
            |held: &Name| held.attempt < attempt || (held.attempt == attempt && is_certain);
        if is_told && held.is_none_or(is_news) {
            self.names.insert(named(functor.txn), Name { attempt, ts, fate: Fate::At });
        }
        let (below, since) = self.acknowledged.entry(client).or_default();
        if *below < functor.acknowledged_below && *since < self.settled {
            // The client will not ask about what it acknowledged before, and no number that was
            // given to a copy of that is undecided: it would be below this one's.
            let over = std::mem::replace(below, functor.acknowledged_below);
            *since = ts;
            let all = (client, 0, Content::NONE)..(client, over, Content::NONE);
            while let Some((&name, _)) = self.names.range(all.clone()).next() {
                self.names.remove(&name);
            }
        }
    }

    /// Below this the versions of a partition are settled, as far as they are computed.
    #[must_use]
    pub fn settled_of(&self, partition: PartitionId) -> Timestamp {
        self.copied.get(&partition).map_or(self.settled, |&copied| copied.max(self.settled))
    }

    /// Drops what is void, or over: then a peer has told what became of it.
    pub fn drop(&mut self, ts: Timestamp) {
        if let Some(image) = self.pending.remove(&ts) {
            self.end(ts, &image, Fate::Refused { is_final: false });
        }
    }

    /// True if a peer knows more of a name than that it is under way.
    #[must_use]
    pub fn is_news(&self, name: Named, told: &Name) -> bool {
        !self.is_forgotten(name.0, name.1)
            && told.fate != Fate::At
            && self.names.get(&name).is_none_or(|held| {
                let ends = |name: &Name| matches!(name.fate, Fate::Ended(_));
                held.attempt < told.attempt
                    || (held.attempt == told.attempt && ends(told) && !ends(held))
            })
    }

    /// A transaction is over, as far as this node is concerned.
    pub fn end(&mut self, ts: Timestamp, image: &Image, fate: Fate) {
        let txn = image.functor.txn;
        if let Some(name) = self.names.get_mut(&named(txn))
            && name.attempt == txn.attempt
            && name.ts == ts
            && name.fate == Fate::At
        {
            name.fate = fate;
        }
    }

    /// True if a client has said that it knows what became of this.
    #[must_use]
    pub fn is_acknowledged(&self, txn: TxnId) -> bool {
        self.acknowledged.get(&txn.client).is_some_and(|(below, _)| txn.counter < *below)
    }

    /// True if its client acknowledged it, and every number that copies of it have, or ever will
    /// have, is decided or above [`State::settled`]: those that come are not the one that was told.
    #[must_use]
    pub fn is_forgotten(&self, client: ClientId, counter: u64) -> bool {
        let acknowledged = self.acknowledged.get(&client);
        acknowledged.is_some_and(|&(below, since)| counter < below && since < self.settled)
    }

    /// True if what became of this name was forgotten here, because that was long ago or because
    /// its client knows. Nothing is accepted under it any more, and whoever asks is told that
    /// nobody can tell.
    #[must_use]
    pub fn is_too_old(&self, client: ClientId, counter: u64) -> bool {
        counter < below(&self.forgotten, client)
    }

    /// Forgets names that have been over for longer than the retention, but not that they were
    /// there.
    pub fn forget(&mut self, retention: Duration) {
        let old = self.settled - retention;
        let Self { pending, names, acknowledged, forgotten, .. } = self;
        names.retain(|&(client, counter, _), name| {
            let is_kept =
                name.ts >= old || (name.fate == Fate::At && pending.contains_key(&name.ts));
            if !is_kept {
                advance(forgotten, client, counter.saturating_add(1));
            }
            is_kept
        });
        acknowledged.retain(|&client, &mut (below, since)| {
            if since < old {
                advance(forgotten, client, below);
            }
            since >= old
        });
    }
}

/// A state that is being divided.
struct Pieces {
    bytes: usize,
    /// Size of the present piece.
    size: usize,
    done: Vec<State>,
    piece: State,
}

impl Pieces {
    /// The piece that something of this size goes into.
    fn next(&mut self, size: usize) -> &mut State {
        if self.size > 0 && self.size + size > self.bytes {
            self.done.push(std::mem::take(&mut self.piece));
            self.size = 0;
        }
        self.size += size;
        &mut self.piece
    }
}

/// Why a transaction was aborted that was not stored everywhere.
pub(super) const ABORTED: orthodrome_core::txn::AbortReason =
    orthodrome_core::txn::AbortReason::Recovery;

#[cfg(test)]
mod tests {
    use orthodrome_core::txn::{Key, Op, Value};

    use super::super::message::Body;
    use super::*;

    /// What is refused before anything is settled is as new as what is refused afterwards: the 10
    /// 088th seed about chairs forgot it with its first checkpoint, and stored it.
    #[test]
    fn what_was_refused_at_the_start_is_remembered() {
        let (retention, at) = (Duration::from_secs(600), Timestamp(1_700_000_000_000_000_000));
        let txn = TxnId::new(ClientId(1), 1);
        let mut state = State::default();
        state.apply(&Change::Refuse { txn, is_final: true, at });
        state.settled = at + Duration::from_secs(599);
        state.forget(retention);
        assert!(state.names.contains_key(&named(txn)));
        state.settled = at + Duration::from_secs(601);
        state.forget(retention);
        assert!(state.names.is_empty());
    }

    fn image(counter: u64, bytes: usize) -> Image {
        let key = Key::from("k");
        let functor = Functor {
            txn: TxnId::new(ClientId(1), counter),
            reads: Vec::new(),
            writes: vec![key.clone()],
            body: Body::Ops(vec![Op::Put(key, Value(vec![0; bytes].into()))]),
            acknowledged_below: 0,
        };
        let (incarnation, ballot, phase, output) = (1, 0, Phase::Tentative, None);
        Image { functor: Arc::new(functor), incarnation, ballot, phase, output }
    }

    /// A node told `aborted(recovery)` of what had committed, once its name was forgotten.
    #[test]
    fn a_forgotten_name_is_too_old_and_not_unknown() {
        let (retention, second) = (Duration::from_secs(600), Duration::from_secs(1));
        let at = Timestamp(1_700_000_000_000_000_000);
        let mut state = State::default();
        state.apply(&Change::Adopt { ts: at, image: image(5, 10) });
        state.apply(&Change::Adopt { ts: at + second * 300, image: image(7, 10) });
        for ts in [at, at + second * 300] {
            let image = state.pending.remove(&ts).unwrap();
            state.end(ts, &image, Fate::Ended(Outcome::Committed(ts)));
        }
        state.settled = at + second * 601;
        state.forget(retention);
        let client = ClientId(1);
        let holds =
            |state: &State, counter| state.names.contains_key(&named(TxnId::new(client, counter)));
        assert!(!holds(&state, 5) && holds(&state, 7));
        assert!(state.is_too_old(client, 5) && !state.is_too_old(client, 6));
        // The tombstone of a late copy does not bring the name back.
        let (ts, late) = (at + second * 602, image(5, 10));
        let (ballot, incarnation, functor) = (0, 1, late.functor);
        state.apply(&Change::Abort { ts, ballot, incarnation, functor });
        assert!(!holds(&state, 5), "{:?}", state.names);
        // Whoever takes over writes what was stored, which is certain.
        state.apply(&Change::Adopt { ts: ts + second, image: image(5, 10) });
        assert!(holds(&state, 5));
        let mut other = State::default();
        other.apply(&Change::Forget(vec![(client, 6), (client, 2)]));
        assert!(other.is_too_old(client, 5) && !other.is_too_old(client, 6));
    }

    /// Sixty transactions of 3 MiB made one record of 180 MiB, which no disk took.
    #[test]
    fn a_checkpoint_is_many_records_however_much_is_pending() {
        let mut state = State { settled: Timestamp(3), ..State::default() };
        for number in 0..60 {
            let ts = Timestamp(10 + number);
            state.apply(&Change::Adopt { ts, image: image(number, 3 << 20) });
        }
        for number in 0..200_000 {
            let name = Name { attempt: 0, ts: Timestamp(1), fate: Fate::At };
            state.names.insert(named(TxnId::new(ClientId(2), number)), name);
            state.forgotten.insert(ClientId(3 + number), number);
        }
        state.acknowledged.insert(ClientId(2), (7, Timestamp(4)));
        state.copied.insert(PartitionId(1), Timestamp(9));
        let pieces = state.pieces(1 << 20);
        let longest = pieces.iter().map(State::size).max().unwrap();
        assert!(longest < 4 << 20, "{longest} bytes in one record");
        assert!(pieces.len() > 60, "{} records", pieces.len());
        let mut again = State::default();
        pieces.into_iter().for_each(|piece| again.extend(piece));
        assert_eq!(again, state);
        assert_eq!(State::default().pieces(1 << 20), [State::default()]);
    }

    /// The 14 268th seed about chairs: a replica that had copied a peer's versions told of them
    /// only as far as its own watermark, and whoever asked it lacked the rest.
    #[test]
    fn what_was_copied_is_settled_beyond_the_watermark() {
        let mut state = State { settled: Timestamp(5), ..State::default() };
        state.copied.insert(PartitionId(1), Timestamp(9));
        state.copied.insert(PartitionId(2), Timestamp(3));
        let settled = [0, 1, 2].map(|partition| state.settled_of(PartitionId(partition)).0);
        assert_eq!(settled, [5, 9, 5]);
    }
}
