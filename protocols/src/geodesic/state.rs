//! What a replica remembers: a function of the changes it made durable.

use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, PartitionId, TxnId};
use orthodrome_core::limits::Pieces;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::store::Store;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Outcome, Version, Writes};
use orthodrome_core::{Wire, WireError};

use super::members::{Election, Members};
use super::message::{Answer, Ballot, Change, Kind, Offer, Output, Stamp, Text, Value};

/// One transaction at one replica.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct Entry {
    /// Everybody who takes part.
    pub participants: Vec<PartitionId>,
    /// The transaction, if the replica knows it and it has not ended.
    pub text: Option<Arc<Text>>,
    /// The replica's stamp.
    pub stamp: Option<Stamp>,
    /// The highest ballot that it has promised.
    pub promised: Ballot,
    /// The accepted value, and its ballot.
    pub accepted: Option<(Ballot, Value)>,
    /// What is in the register, if this replica keeps it (D16).
    pub offer: Option<Arc<Offer>>,
    /// F, if the replica has heard of it.
    pub finally_at: Option<Timestamp>,
    /// How it ended.
    pub ended: Option<Arc<Output>>,
    /// The replica's disk is new, and the entry comes from peers. Nobody knows what the lost disk has
    /// said of the transaction, so this replica takes no part in it.
    pub is_inherited: bool,
    /// It is pending, and others read what it writes: that is certain, because F is, and does not depend
    /// on what it reads.
    pub is_visible: bool,
}

impl Entry {
    /// Where the transaction stands here while it is pending: at F, or at its stamp. One that was
    /// inherited may have any place.
    #[must_use]
    pub fn pending_at(&self) -> Option<Timestamp> {
        if self.ended.is_some() {
            return None;
        }
        let anywhere = self.is_inherited.then_some(Timestamp::ZERO);
        self.finally_at.or(self.stamp.map(|stamp| stamp.at)).or(anywhere)
    }

    /// Where others that read what it writes have to wait for it.
    #[must_use]
    pub fn awaited_at(&self) -> Option<Timestamp> {
        self.pending_at().filter(|_| !self.is_visible)
    }

    /// True if the replica knows what the transaction does, or how it ended.
    #[must_use]
    pub fn is_known(&self) -> bool {
        self.text.is_some() || self.ended.is_some()
    }

    /// True if the replica must not say anything about it, because the lost disk may have said
    /// something else.
    #[must_use]
    pub fn is_barred(&self) -> bool {
        self.is_inherited && self.ended.is_none()
    }

    /// What it says to a recovery coordinator.
    #[must_use]
    pub fn answer(&self) -> Answer {
        let Self { text, stamp, promised, accepted, offer, ended, .. } = self;
        Answer {
            promised: *promised,
            stamp: *stamp,
            accepted: *accepted,
            text: text.clone(),
            offer: offer.clone(),
            ended: ended.clone(),
            is_forgotten: false,
            has_ended: false,
            outcome: None,
        }
    }
}

/// A replica's durable state, data apart.
#[derive(Clone, PartialEq, Eq, Debug, Default, Wire)]
pub struct State {
    /// Transactions that are unfinished or not forgotten.
    pub entries: OrdMap<TxnId, Entry>,
    /// Clients know the outcomes of their transactions below these counters.
    pub acknowledged: OrdMap<ClientId, u64>,
    /// At or above every closing.
    pub ceiling: Timestamp,
    /// Nothing unfinished is, or will be, at or below this.
    pub mark: Timestamp,
    /// Versions that are not the newest of their key below this are gone.
    pub collected: Timestamp,
    /// Transactions that this replica has forgotten, or would have, lately.
    pub forgotten: OrdSet<TxnId>,
    /// Below these counters the replica no longer tells which transactions it has forgotten and of which
    /// it has never heard.
    pub floors: OrdMap<ClientId, u64>,
    /// Outcomes of forgotten transactions whose clients may still ask: all that is kept of them,
    /// because whole entries took too much memory.
    #[wire(check = "check_outcomes")]
    pub outcomes: OrdMap<TxnId, Outcome>,
    /// The disk replaced a lost one, which may have had a part in transactions with timestamps up to
    /// this. This replica has none in them.
    pub barred: Timestamp,
    /// The copy from its peers is incomplete.
    pub is_rejoining: bool,
    /// A peer's disk was lost: this replica gives no stamps to transactions up to here that it does not
    /// know.
    pub sealed: Timestamp,
    /// The members of the group, unless they are those of the placement.
    pub members: Option<Arc<Members>>,
    /// The register of the next members.
    pub election: Election,
}

fn check_outcomes(outcomes: &OrdMap<TxnId, Outcome>) -> Result<(), WireError> {
    outcomes.values().try_for_each(Outcome::check_decided)
}

impl State {
    /// Carries out a change. The same changes give the same state after a restart.
    pub fn apply(
        &mut self,
        (cluster, partition): (&Cluster, PartitionId),
        change: &Change,
        store: &mut Store,
    ) {
        match change {
            Change::Stamp { text, at } => {
                let entry = self.entry(text.txn(), &text.participants(), Some(text));
                entry.stamp = Some(Stamp { at: *at, kind: Kind::Confirmed });
            }
            Change::Direct { text, at } => {
                let entry = self.entry(text.txn(), &text.participants(), Some(text));
                entry.stamp = Some(Stamp { at: *at, kind: Kind::Direct });
            }
            Change::Confirm { txn, at } => {
                if let Some(entry) = self.entries.get_mut(txn) {
                    entry.stamp = Some(Stamp { at: *at, kind: Kind::Confirmed });
                }
            }
            Change::Promise { txn, participants, text, ballot, stamp } => {
                let entry = self.entry(*txn, participants, text.as_ref());
                entry.promised = entry.promised.max(*ballot);
                if let Some(at) = stamp {
                    entry.stamp = Some(Stamp { at: *at, kind: Kind::Recovery });
                }
            }
            Change::Accept { txn, participants, text, ballot, value } => {
                let entry = self.entry(*txn, participants, text.as_ref());
                entry.promised = entry.promised.max(*ballot);
                entry.accepted = Some((*ballot, *value));
            }
            Change::Store { txn, participants, offer } => {
                let entry = self.entry(*txn, participants, None);
                entry.promised = entry.promised.max(offer.ballot);
                entry.offer = Some(offer.clone());
            }
            Change::Final { txn, text, at } => {
                let participants = text.as_ref().map_or_else(Vec::new, |text| text.participants());
                let entry = self.entry(*txn, &participants, text.as_ref());
                entry.finally_at = Some(*at);
                let fixed = entry.text.as_ref().and_then(|text| text.fixed_writes());
                if let Some(writes) = fixed.filter(|_| entry.ended.is_none()) {
                    entry.is_visible = true;
                    put((cluster, partition), (*txn, *at), &writes, store);
                }
            }
            Change::End { txn, participants, output } => {
                let entry = self.entry(*txn, participants, None);
                if entry.ended.is_some() {
                    return;
                }
                entry.ended = Some(output.clone());
                (entry.text, entry.offer) = (None, None);
                if let Outcome::Committed(at) = output.outcome {
                    put((cluster, partition), (*txn, at), &output.writes, store);
                }
            }
            Change::Copy { keys } => store.put_copies(partition, keys.clone()),
            Change::Forget(txns) => {
                for txn in txns {
                    self.forget(*txn);
                }
            }
            Change::Shorten(txns) => {
                for txn in txns {
                    let ended = self.forget(*txn).and_then(|entry| entry.ended);
                    if let Some(output) = ended.filter(|_| !self.is_acknowledged(*txn)) {
                        self.outcomes.insert(*txn, output.outcome);
                    }
                }
            }
            Change::Acknowledge(clients) => {
                for &(client, below) in clients {
                    let known = self.acknowledged.entry(client).or_default();
                    *known = (*known).max(below);
                    remove_below(&mut self.outcomes, client, *known);
                }
            }
            Change::Age(clients) => {
                for &(client, below) in clients {
                    let floor = self.floors.entry(client).or_default();
                    *floor = (*floor).max(below);
                    let of = |counter| TxnId::new(client, counter);
                    let old = self.forgotten.range(of(0)..of(below)).copied();
                    for txn in old.collect::<Vec<_>>() {
                        self.forgotten.remove(&txn);
                    }
                }
            }
            Change::Rejoin(until) => {
                (self.barred, self.is_rejoining) = (self.barred.max(*until), true);
                self.ceiling = self.ceiling.max(*until);
                // The lost disk may have known of deletions that all peers have dropped since.
                store.may_lack(partition, *until);
            }
            Change::Inherit(part) => {
                for (txn, entry) in &part.entries {
                    self.inherit(*txn, entry);
                }
                for (&client, &below) in &part.acknowledged {
                    let known = self.acknowledged.entry(client).or_default();
                    *known = below.max(*known);
                }
                for (&client, &below) in &part.floors {
                    let floor = self.floors.entry(client).or_default();
                    *floor = below.max(*floor);
                }
                self.forgotten.extend(&part.forgotten);
                self.outcomes.extend(&part.outcomes);
                self.collected = self.collected.max(part.collected);
                // The lost disk may have promised or accepted next members. Of those with whom it made
                // up a majority, one at least is among the f + 1 who send their state.
                let Election { promised, accepted } = &part.election;
                self.election.promised = self.election.promised.max(*promised);
                let ballot_of = |it: &Option<(Ballot, _)>| it.as_ref().map(|(ballot, _)| *ballot);
                if ballot_of(accepted) > ballot_of(&self.election.accepted) {
                    self.election.accepted.clone_from(accepted);
                }
            }
            Change::Rejoined => self.is_rejoining = false,
            Change::Seal(until) => self.sealed = self.sealed.max(*until),
            Change::Elect(ballot, members) => {
                self.election.promised = *ballot;
                if let Some(members) = members {
                    self.election.accepted = Some((*ballot, members.clone()));
                }
            }
            Change::Members(members) => {
                (self.members, self.election) = (Some(members.clone()), Election::default());
            }
            Change::Leave(members) => {
                *self = Self { members: Some(members.clone()), ..Self::default() };
                // What others delete from now on would come back with it.
                store.clear(partition);
            }
            Change::Ceiling(ceiling) => self.ceiling = self.ceiling.max(*ceiling),
            Change::Mark(mark) => self.mark = self.mark.max(*mark),
        }
    }

    /// Takes over what a peer knows of a transaction, except for what the peer itself has said of it.
    fn inherit(&mut self, txn: TxnId, of_peer: &Entry) {
        let participants = &of_peer.participants;
        let entry = self.entry(txn, participants, of_peer.text.as_ref());
        entry.is_inherited = true;
        entry.finally_at = entry.finally_at.or(of_peer.finally_at);
        if entry.ended.is_none() && of_peer.ended.is_some() {
            (entry.ended, entry.text) = (of_peer.ended.clone(), None);
        }
    }

    fn forget(&mut self, txn: TxnId) -> Option<Entry> {
        if !self.is_below_floor(txn) {
            self.forgotten.insert(txn);
        }
        self.entries.remove(&txn)
    }

    fn entry(
        &mut self,
        txn: TxnId,
        participants: &[PartitionId],
        text: Option<&Arc<Text>>,
    ) -> &mut Entry {
        let entry = self.entries.entry(txn).or_default();
        if entry.participants.is_empty() {
            entry.participants = participants.to_vec();
        }
        if entry.text.is_none() && entry.ended.is_none() {
            entry.text = text.cloned();
        }
        entry
    }

    /// True if the transaction's client knows its outcome.
    #[must_use]
    pub fn is_acknowledged(&self, txn: TxnId) -> bool {
        self.acknowledged.get(&txn.client).is_some_and(|&below| txn.counter < below)
    }

    fn is_below_floor(&self, txn: TxnId) -> bool {
        self.floors.get(&txn.client).is_some_and(|&floor| txn.counter < floor)
    }

    /// True if nothing is known of the transaction, and it is not to become known again: it has been
    /// forgotten (R6), or its client has known the outcome for so long that this may be so.
    #[must_use]
    pub fn is_forgotten(&self, txn: TxnId) -> bool {
        !self.entries.contains_key(&txn)
            && (self.forgotten.contains(&txn) || self.is_below_floor(txn))
    }

    /// The same in parts, each of at most so many bytes unless one transaction alone has more.
    #[must_use]
    pub fn divide(self, bytes_max: usize) -> Vec<Self> {
        let Self { entries, acknowledged, ceiling, mark, collected, forgotten, .. } = self;
        let Self { floors, outcomes, barred, is_rejoining, sealed, members, election, .. } = self;
        let empty =
            Self { ceiling, mark, collected, barred, is_rejoining, sealed, ..Self::default() };
        let empty = Self { members, election, ..empty };
        let mut parts = Pieces::new(empty, bytes_max);
        for (txn, entry) in entries {
            parts.of(entry.size() + ENTRY).entries.insert(txn, entry);
        }
        for (client, below) in acknowledged {
            parts.of(ENTRY).acknowledged.insert(client, below);
        }
        for txn in forgotten {
            parts.of(ENTRY).forgotten.insert(txn);
        }
        for (client, floor) in floors {
            parts.of(ENTRY).floors.insert(client, floor);
        }
        for (txn, outcome) in outcomes {
            parts.of(OUTCOME).outcomes.insert(txn, outcome);
        }
        parts.finish()
    }

    /// Adds another part of the same state.
    pub fn join(&mut self, part: Self) {
        self.entries.extend(part.entries);
        self.acknowledged.extend(part.acknowledged);
        self.forgotten.extend(part.forgotten);
        self.floors.extend(part.floors);
        self.outcomes.extend(part.outcomes);
    }
}

/// Stores what a transaction writes in one partition.
fn put(
    (cluster, partition): (&Cluster, PartitionId),
    (txn, timestamp): (TxnId, Timestamp),
    writes: &Writes,
    store: &mut Store,
) {
    let version = Version { timestamp, writer: txn.name() };
    for (key, value) in writes {
        if cluster.partition_of(key) == partition {
            store.put(partition, key.clone(), version, value.clone());
        }
    }
}

/// Removes what is about transactions of `client` below a counter.
fn remove_below<V>(map: &mut OrdMap<TxnId, V>, client: ClientId, below: u64) {
    let of = |counter| TxnId::new(client, counter);
    let old: Vec<TxnId> = map.range(of(0)..of(below)).map(|(txn, _)| *txn).collect();
    for txn in old {
        map.remove(&txn);
    }
}

/// Encoded size of a name with what stands around it.
const ENTRY: usize = 24;

/// Encoded size of a name and an outcome with what stands around them.
pub(super) const OUTCOME: usize = 48;
