//! Read-only transactions at a partition's leader: the newest values, and a promise of how long they
//! stay the newest. As in two-phase locking.

use std::collections::BTreeSet;

use orthodrome_core::id::TxnId;
use orthodrome_core::time::Timestamp;

use super::Note;
use super::leader::{Leading, WaitingRead, World};
use super::message::{Command, Msg};
use crate::gateway::Snapshot;

impl Leading<'_> {
    /// A read-only transaction's part: the newest values, and how long they are promised to be the
    /// newest. Served under a lease or after a leadership check (C12), within the ceiling that the
    /// group has agreed to honour (R8), and not before every writer has ended that was prepared when
    /// the request came: one of them may have been told to commit.
    pub(super) fn on_read_only(&mut self, read: WaitingRead, world: &mut World<'_>) {
        let has_lease = self.replica.has_lease(world.cx.now());
        if has_lease {
            self.read_as_leader(read, world);
            return;
        }
        world.cx.note(Note::ReadIndex);
        let id = self.leader.next_read;
        self.leader.next_read += 1;
        self.leader.reads.insert(id, read);
        self.read_index(id, world);
    }

    /// The answer to a leadership check.
    pub(super) fn on_read_index(&mut self, id: u64, is_leader: bool, world: &mut World<'_>) {
        let Some(read) = self.leader.reads.remove(&id) else { return };
        if is_leader {
            self.read_as_leader(read, world);
        } else {
            let WaitingRead { client, txn, .. } = read;
            let partition = self.id;
            world.send(client, Msg::NotLeader { partition, leader: None, txn: Some(txn) });
        }
    }

    fn read_as_leader(&mut self, mut read: WaitingRead, world: &mut World<'_>) {
        if read.at_least > self.state.ceiling {
            let ceiling = read.at_least + world.config.ceiling_ahead;
            self.leader.reads_above_ceiling.push(read);
            if self.leader.ceiling_proposed < ceiling {
                self.leader.ceiling_proposed = ceiling;
                self.propose(Command::Ceiling(ceiling), world);
            }
            return;
        }
        // Whoever prepares from here on commits later than what is promised at least.
        self.leader.floor = self.leader.floor.max(read.at_least);
        let writers = self.leader.writers(&read.keys);
        let behind: BTreeSet<TxnId> = match read.behind.take() {
            None => writers,
            Some(known) => known.intersection(&writers).copied().collect(),
        };
        if behind.is_empty() {
            self.serve_read(read, world);
            return;
        }
        world.cx.note(Note::ReadWait);
        read.behind = Some(behind);
        self.leader.reads_behind.push(read);
    }

    /// Answers a read-only request.
    fn serve_read(&mut self, read: WaitingRead, world: &mut World<'_>) {
        let WaitingRead { client, txn, keys, at_least, .. } = read;
        let wanted = world.cx.clock().now.max(at_least).max(self.leader.floor);
        let mut valid_until = wanted.min(self.state.ceiling).max(self.state.floor);
        // Writers that prepared since the request came will not commit below their proposals.
        for writer in self.leader.writers(&keys) {
            let prepared = self.state.prepared.get(&writer).or(self.leader.preparing.get(&writer));
            let proposal = prepared.map_or(Timestamp::MAX, |prepared| prepared.proposal);
            valid_until = valid_until.min(Timestamp(proposal.0.saturating_sub(1)));
        }
        self.leader.floor = self.leader.floor.max(valid_until);
        let is_too_much = world.is_too_much(self.id, &keys);
        let told = if is_too_much { vec![] } else { keys };
        let reads = told.into_iter().map(|key| {
            let read = world.store.read(self.id, &key);
            (key, read)
        });
        let snapshot = Snapshot { reads: reads.collect(), valid_until };
        let partition = self.id;
        world.send(client, Msg::ReadOnlyResult { txn, partition, snapshot, is_too_much });
    }

    /// `txn` has ended: read-only requests need not wait for it any more.
    pub(super) fn release_reads(&mut self, txn: TxnId, world: &mut World<'_>) {
        let mut free = Vec::new();
        self.leader.reads_behind.retain_mut(|read| {
            let waits = read.behind.as_mut().is_some_and(|behind| {
                behind.remove(&txn);
                !behind.is_empty()
            });
            if !waits {
                free.push(read.clone());
            }
            waits
        });
        for read in free {
            self.on_read_only(read, world);
        }
    }

    /// A later ceiling is chosen: answer who waited for it.
    pub(super) fn on_ceiling(&mut self, world: &mut World<'_>) {
        for read in std::mem::take(&mut self.leader.reads_above_ceiling) {
            self.on_read_only(read, world);
        }
    }
}
