//! Takes over from lost coordinators: connects [`super::takeover`] to this node, and writes the
//! surviving transactions.

use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId, TxnId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::Timestamp;

use super::Note;
use super::coordinator::replicas;
use super::directory::Task;
use super::message::{Functor, Msg, Refusal};
use super::server::World;
use super::takeover::{self, Backup, Part, Promise, Stage, Takeover, ToWrite};
use crate::waiting::RetryState;

impl takeover::Functor for Arc<Functor> {
    type Name = TxnId;

    fn name(&self) -> TxnId {
        self.txn
    }

    fn partitions(&self, cluster: &Cluster) -> OrdSet<PartitionId> {
        self.writes.iter().map(|key| cluster.partition_of(key)).collect()
    }
}

/// The takeovers of a node.
#[derive(Debug, Default)]
pub(super) struct Recoveries {
    running: OrdMap<Task, Takeover<Arc<Functor>>>,
    drives: OrdMap<Timestamp, Drive>,
    /// Finished takeovers that the directory does not know yet.
    pub finished: Vec<Task>,
}

/// A transaction that is written for a lost coordinator.
#[derive(Debug)]
struct Drive {
    task: Task,
    functor: Arc<Functor>,
    /// True if no client has an answer about it.
    is_optional: bool,
    words: OrdMap<NodeId, Word>,
    is_finalizing: bool,
    asked: RetryState,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Word {
    Silent,
    Refused,
    Stored,
    Confirmed,
}

impl Recoveries {
    /// The number of running takeovers.
    pub(super) fn len(&self) -> usize {
        self.running.len()
    }

    /// Handles the directory's assignment of takeovers to this node.
    pub(super) fn assign(
        &mut self,
        tasks: &OrdSet<Task>,
        backup: &Backup<Arc<Functor>>,
        world: &mut World<'_, '_>,
    ) {
        self.running.retain(|task, _| tasks.contains(task));
        self.drives.retain(|_, drive| tasks.contains(&drive.task));
        for &task in tasks {
            if self.running.contains_key(&task) {
                continue;
            }
            world.cx.note(Note::Takeover);
            let known = backup.open(task.server, task.incarnation);
            let (visible, now) = (world.marks.visible, world.cx.now());
            let takeover = Takeover::new(task, world.cluster, known, visible, now);
            say(&takeover, world);
            self.running.insert(task, takeover);
        }
    }

    /// Handles a replica's promise.
    pub(super) fn on_promised(
        &mut self,
        from: NodeId,
        (partition, task): (PartitionId, Task),
        part: Part,
        promise: Promise<Arc<Functor>>,
        world: &mut World<'_, '_>,
    ) {
        let now = world.cx.now();
        let Some(takeover) = self.running.get_mut(&task) else { return };
        let before = takeover.stage();
        let of = (partition, task);
        let writes = takeover.on_promised(from, of, part, promise, world.cluster, now);
        if before == Stage::Promises && takeover.stage() != Stage::Promises {
            say(takeover, world);
        }
        for ToWrite { at, functor, is_optional } in writes {
            world.cx.note(Note::Rewritten);
            let nodes = replicas(world.cluster, &partitions(&functor, world.cluster));
            let words = nodes.into_iter().map(|node| (node, Word::Silent)).collect();
            let asked = RetryState::new(now);
            let is_finalizing = false;
            let drive = Drive { task, functor, is_optional, words, is_finalizing, asked };
            drive.send(at, world);
            self.drives.insert(at, drive);
        }
    }

    /// Handles the message that a replica has closed.
    pub(super) fn on_closed(&mut self, from: NodeId, partition: PartitionId, task: Task) {
        if let Some(takeover) = self.running.get_mut(&task)
            && takeover.on_closed(from, partition, task)
        {
            self.finished.push(task);
        }
    }

    /// Handles the message that a replica has stored, marked or refused a version in a ballot of
    /// this node.
    fn hear(
        &mut self,
        from: NodeId,
        (ts, ballot): (Timestamp, u64),
        word: Word,
        world: &mut World<'_, '_>,
    ) {
        let Some(drive) = self.drives.get_mut(&ts) else { return };
        let Some(held) = drive.words.get_mut(&from) else { return };
        if drive.task.ballot != ballot || (*held == Word::Confirmed && word == Word::Stored) {
            return;
        }
        *held = word;
        let parts = partitions(&drive.functor, world.cluster);
        let everywhere = |wanted: &[Word]| {
            parts.iter().all(|&partition| drive.has_majority(partition, wanted, world.cluster))
        };
        let is_stored = everywhere(&[Word::Stored, Word::Confirmed]);
        let is_confirmed = everywhere(&[Word::Confirmed]);
        let is_refused = (drive.is_optional && word == Word::Refused)
            || parts
                .iter()
                .any(|&partition| drive.has_majority(partition, &[Word::Refused], world.cluster));
        if is_confirmed || is_refused {
            self.end(ts, is_confirmed, world);
        } else if is_stored && !std::mem::replace(&mut drive.is_finalizing, true) {
            for &to in drive.words.keys() {
                world.send(to, Msg::Finalize { ts, ballot });
            }
        }
    }

    fn end(&mut self, ts: Timestamp, is_written: bool, world: &mut World<'_, '_>) {
        let Some(drive) = self.drives.remove(&ts) else { return };
        let Some(takeover) = self.running.get_mut(&drive.task) else { return };
        let now = world.cx.now();
        let is_last =
            if is_written { takeover.on_written(ts, now) } else { takeover.on_refused(ts, now) };
        if is_last {
            say(takeover, world);
        }
    }

    pub(super) fn on_written(
        &mut self,
        from: NodeId,
        ts: Timestamp,
        ballot: u64,
        world: &mut World<'_, '_>,
    ) {
        self.hear(from, (ts, ballot), Word::Stored, world);
    }

    pub(super) fn on_confirm(
        &mut self,
        from: NodeId,
        (ts, ballot): (Timestamp, u64),
        is_held: bool,
        world: &mut World<'_, '_>,
    ) {
        if is_held {
            self.hear(from, (ts, ballot), Word::Confirmed, world);
        } else if let Some(drive) = self.drives.get(&ts)
            && drive.task.ballot == ballot
        {
            world.send(from, drive.write(ts));
        }
    }

    pub(super) fn on_refused(
        &mut self,
        from: NodeId,
        (ts, ballot): (Timestamp, u64),
        refusal: Refusal,
        world: &mut World<'_, '_>,
    ) {
        match refusal {
            Refusal::Known => self.hear(from, (ts, ballot), Word::Refused, world),
            // One final refusal proves that its coordinator never had it stored.
            Refusal::Final => {
                if self.drives.get(&ts).is_some_and(|drive| drive.task.ballot == ballot) {
                    self.end(ts, false, world);
                }
            }
            // It is retried until the replica's clock has advanced, or another server takes over.
            Refusal::Ahead | Refusal::Below | Refusal::Outvoted => {}
        }
    }

    /// Repeats unanswered messages, without limit (V4).
    pub(super) fn on_sweep(&mut self, world: &mut World<'_, '_>) {
        let (now, timeout) = (world.cx.now(), world.config.resend_after);
        // Promises are long, and slow links must have capacity for other messages.
        let long = timeout.max(world.config.directory.lease);
        for takeover in self.running.values_mut() {
            if takeover.is_due(long, now) {
                say(takeover, world);
            }
        }
        let mut given_up = Vec::new();
        for (&ts, drive) in &mut self.drives {
            if !drive.asked.is_due(timeout, now) {
                continue;
            }
            drive.asked = drive.asked.again(now);
            if world.config.mutations.takeover_gives_up() && drive.asked.times > 1 {
                given_up.push(ts);
                continue;
            }
            world.cx.note(Note::Resent);
            drive.send(ts, world);
        }
        for ts in given_up {
            self.end(ts, false, world);
        }
    }
}

impl Drive {
    fn write(&self, ts: Timestamp) -> Msg {
        let Task { ballot, incarnation, .. } = self.task;
        Msg::Write { ts, ballot, incarnation, functor: self.functor.clone() }
    }

    fn send(&self, ts: Timestamp, world: &mut World<'_, '_>) {
        for (&to, word) in &self.words {
            match word {
                Word::Silent | Word::Refused => world.send(to, self.write(ts)),
                Word::Stored if self.is_finalizing => {
                    world.send(to, Msg::Finalize { ts, ballot: self.task.ballot });
                }
                Word::Stored | Word::Confirmed => {}
            }
        }
    }

    fn has_majority(&self, partition: PartitionId, wanted: &[Word], cluster: &Cluster) -> bool {
        let all = cluster.partition(partition).map_or(&[][..], |placed| &placed.replicas);
        let says = |node: &&NodeId| self.words.get(node).is_some_and(|word| wanted.contains(word));
        all.iter().filter(says).count() > all.len() / 2
    }
}

/// The partitions that a transaction writes.
pub(super) fn partitions(functor: &Functor, cluster: &Cluster) -> Vec<PartitionId> {
    let mut partitions: Vec<PartitionId> =
        functor.writes.iter().map(|key| cluster.partition_of(key)).collect();
    partitions.sort_unstable();
    partitions.dedup();
    partitions
}

/// Sends the current messages of a takeover.
fn say(takeover: &Takeover<Arc<Functor>>, world: &mut World<'_, '_>) {
    for (to, msg) in takeover.round() {
        world.send(to, Msg::Takeover(Box::new(msg)));
    }
    let Task { ballot, incarnation, .. } = *takeover.task();
    for (ts, functor) in takeover.void() {
        for to in replicas(world.cluster, &partitions(functor, world.cluster)) {
            let functor = functor.clone();
            world.send(to, Msg::Abort { ts, ballot, incarnation, functor });
        }
    }
}
