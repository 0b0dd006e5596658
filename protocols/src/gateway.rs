//! What the gateways of all protocols with leaders share: they find the participants and the
//! coordinator of a transaction, and read snapshots.

use std::fmt;

use orthodrome_core::Wire;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, RegionId, TxnId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::session::{self, Floors};
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::txn::{Key, Kind, Outcome, Read, Reads, Txn};

/// The path of an answer about a transaction whose client does not say what it decided. Protocols in
/// which no server knows a transaction before its client decides cannot find it then. If its client
/// never asked to commit it, it had no effect.
pub(crate) const UNDECIDED: &str = "undecided";

/// One partition's part of a transaction's read and write sets.
#[derive(Clone, PartialEq, Eq, Wire)]
pub struct Participant {
    /// The partition.
    pub partition: PartitionId,
    /// Keys of this partition that the transaction reads.
    pub reads: Vec<Key>,
    /// Keys of this partition that it may write.
    pub writes: Vec<Key>,
    /// The largest timestamp among the versions of these keys that the client knows; older versions
    /// must not be shown to it (R11). Zero if it knows none.
    pub floor: Timestamp,
}

impl fmt::Debug for Participant {
    /// As derived, but without the floor if it is zero.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { partition, reads, writes, floor } = self;
        let mut text = f.debug_struct("Participant");
        text.field("partition", partition).field("reads", reads).field("writes", writes);
        if *floor != Timestamp::ZERO {
            text.field("floor", floor);
        }
        text.finish()
    }
}

impl Participant {
    /// The number of its keys, those that are read and written twice.
    #[must_use]
    pub fn keys(&self) -> usize {
        self.reads.len() + self.writes.len()
    }

    /// A participant whose keys are not known, or not yet.
    pub(crate) fn bare(partition: PartitionId) -> Self {
        Self { partition, reads: vec![], writes: vec![], floor: Timestamp::ZERO }
    }
}

/// Splits the keys by partition.
pub(crate) fn split<'a>(
    cluster: &Cluster,
    reads: impl IntoIterator<Item = &'a Key>,
    writes: impl IntoIterator<Item = &'a Key>,
) -> OrdMap<PartitionId, Participant> {
    let mut participants = OrdMap::new();
    for key in reads {
        let at = cluster.partition_of(key);
        participants.entry(at).or_insert_with(|| Participant::bare(at)).reads.push(key.clone());
    }
    for key in writes {
        let at = cluster.partition_of(key);
        participants.entry(at).or_insert_with(|| Participant::bare(at)).writes.push(key.clone());
    }
    participants
}

/// Sets the floor of each participant to what the transaction's client knows of its keys there
/// (R11).
pub(crate) fn set_floors(participants: &mut OrdMap<PartitionId, Participant>, floors: &Floors) {
    for participant in participants.values_mut() {
        let keys = participant.reads.iter().chain(&participant.writes);
        participant.floor = session::highest(floors, keys);
    }
}

/// The group that coordinates a transaction (Carousel §3.3): a participant that is led in the
/// client's region if there is one; otherwise any group led there; otherwise the group led nearest
/// to it. It uses preferred leaders, so that the result depends only on the transaction and the
/// placement.
#[must_use]
pub fn coordinator_of(
    cluster: &Cluster,
    txn: TxnId,
    home: RegionId,
    mut participants: impl Iterator<Item = PartitionId>,
) -> PartitionId {
    if let Some(local) = participants.find(|&partition| cluster.leader_region(partition) == home) {
        return local;
    }
    let distance = |partition: PartitionId| {
        let region = cluster.leader_region(partition);
        if region == home { Duration::ZERO } else { cluster.topology.rtt(home, region) }
    };
    let nearest = cluster.partitions().map(|p| distance(p.id)).min().unwrap_or_default();
    let near: Vec<PartitionId> =
        cluster.partitions().map(|p| p.id).filter(|&id| distance(id) == nearest).collect();
    let turn = txn.counter.checked_rem(near.len() as u64).unwrap_or(0);
    near.get(usize::try_from(turn).unwrap_or(0)).copied().unwrap_or_default()
}

/// A partition's answer to a read-only transaction: the latest committed values, and a promise that
/// these keys will have no other version with a timestamp up to `valid_until`.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
pub struct Snapshot {
    /// Every key of the request.
    pub reads: Vec<(Key, Read)>,
    /// The end of the promise, inclusive.
    pub valid_until: Timestamp,
}

/// The progress of a read-only transaction (Carousel §4.4.2, with C11 to C13).
#[derive(Debug, Default)]
pub(crate) struct Snapshots {
    /// The answer of each partition.
    parts: OrdMap<PartitionId, Snapshot>,
    /// The timestamp that the promises of this round must reach.
    pub at_least: Timestamp,
    /// True if some partitions were asked again.
    is_later_round: bool,
}

impl Snapshots {
    /// True if this answers the current round, and not the previous one.
    pub fn is_current(&self, snapshot: &Snapshot) -> bool {
        snapshot.valid_until >= self.at_least
    }

    pub fn insert(&mut self, partition: PartitionId, snapshot: Snapshot) {
        self.parts.insert(partition, snapshot);
    }

    /// All parts are here. They form a snapshot if some timestamp is at or above every version
    /// read, and within every promise: returns the reads of `txn` and its outcome. Otherwise
    /// returns the partitions to ask again, whose promises fall short. A key that is absent, with a
    /// version that nobody wrote, may have been deleted as late as at the time of that version.
    pub fn complete(&mut self, txn: &Txn) -> Result<(Reads, Outcome), Vec<PartitionId>> {
        let reads = self.parts.values().flat_map(|part| &part.reads);
        let at = reads.map(|(_, read)| read.version.timestamp).max().unwrap_or_default();
        let is_short = |_: &PartitionId, part: &mut Snapshot| part.valid_until < at;
        let short: Vec<PartitionId> =
            self.parts.extract_if(.., is_short).map(|(partition, _)| partition).collect();
        if !short.is_empty() {
            self.at_least = at;
            self.is_later_round = true;
            return Err(short);
        }
        let parts = std::mem::take(&mut self.parts);
        // The times of deletions that nobody remembers are not for clients.
        let told = |(key, read): (Key, Read)| {
            (key, if read.version.is_unwritten() { Read::default() } else { read })
        };
        let reads: Reads = parts.into_values().flat_map(|part| part.reads).map(told).collect();
        let outcome = match &txn.kind {
            Kind::Procedure(ops) => match Txn::execute(ops, &reads) {
                Ok(_) => Outcome::Committed(at),
                Err(reason) => Outcome::Aborted(reason),
            },
            Kind::Interactive | Kind::General | Kind::ReadOnly | Kind::StaleReadOnly => {
                Outcome::Committed(at)
            }
        };
        Ok((reads, outcome))
    }

    /// The path of the transaction, for reports.
    pub fn path(&self) -> &'static str {
        if self.is_later_round { "read-only-again" } else { "read-only" }
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::ClientId;
    use orthodrome_core::txn::{Value, Version};

    use super::*;

    fn snapshot(key: &str, value: Option<&str>, version: Version, valid_until: u64) -> Snapshot {
        let read = Read { value: value.map(Value::from), version };
        Snapshot { reads: vec![(key.into(), read)], valid_until: Timestamp(valid_until) }
    }

    /// A reader was told that one key is absent, although another one still had a value that the
    /// deletion had read: the server of the first had forgotten when the deletion was.
    #[test]
    fn a_forgotten_deletion_may_be_as_late_as_its_server_says() {
        let txn = Txn::read_only(TxnId::new(ClientId(1), 1), RegionId(0), vec!["a".into()]);
        let written = Version { timestamp: Timestamp(3), writer: TxnId::new(ClientId(2), 1) };
        let unwritten = Version { timestamp: Timestamp(9), ..Version::INITIAL };
        let (first, second) = (PartitionId(0), PartitionId(1));
        let mut snapshots = Snapshots::default();
        snapshots.insert(first, snapshot("a", Some("old"), written, 5));
        snapshots.insert(second, snapshot("b", None, unwritten, 20));
        assert_eq!(snapshots.complete(&txn), Err(vec![first]));
        assert_eq!(snapshots.at_least, Timestamp(9));
        snapshots.insert(first, snapshot("a", Some("old"), written, 9));
        let (reads, outcome) = snapshots.complete(&txn).unwrap();
        assert_eq!(outcome, Outcome::Committed(Timestamp(9)));
        assert_eq!(reads.get(&Key::from("b")), Some(&Read::default()), "no client compares it");
        assert_eq!(reads.get(&Key::from("a")).unwrap().version, written);
    }
}
