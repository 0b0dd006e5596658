//! What a replica gives to other servers and takes from them: answers to those that copy, promises to
//! those that take over, and closings of incarnations.

use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, PartitionId};
use orthodrome_core::time::Timestamp;

use super::{Replica, names_max};
use crate::ocean_vista::Note;
use crate::ocean_vista::directory::Task;
use crate::ocean_vista::message::{Change, Functor};
use crate::ocean_vista::server::World;
use crate::ocean_vista::state::{Fate, Image, Name, Phase};
use crate::ocean_vista::sync::{Answer, Covered};
use crate::ocean_vista::takeover::{Closed, Held, Mark, Promise};

impl Replica {
    /// Takes in a transaction that the others have decided on, below the Vwatermark.
    pub(in crate::ocean_vista) fn adopt(
        &mut self,
        ts: Timestamp,
        image: Image,
        world: &mut World<'_, '_>,
    ) {
        world.cx.note(Note::Adopted);
        self.change(Change::Adopt { ts, image }, world);
        self.enter(ts, world.cluster);
        if ts < self.state.settled {
            self.settle_one(ts, world);
        }
        self.wake(ts, world);
    }

    /// What this node holds of a partition in a range, for a peer that lacks some of it.
    pub(in crate::ocean_vista) fn answer(
        &self,
        partition: PartitionId,
        range: (Timestamp, Timestamp),
        cluster: &Cluster,
    ) -> Answer {
        let (from, to) = range;
        let writes = |image: &Image| {
            image.functor.writes.iter().any(|key| cluster.partition_of(key) == partition)
        };
        let all = self.state.pending.range(from..=to.max(from));
        let entries = all.filter(|(_, image)| writes(image));
        let is_wanted = |name: &Name| name.ts >= from || matches!(name.fate, Fate::Refused { .. });
        let names = self.state.names.iter().filter(|(_, name)| is_wanted(name));
        Answer {
            settled: self.state.settled_of(partition),
            entries: entries.map(|(ts, image)| (*ts, image.clone())).collect(),
            names: names.map(|(name, held)| (*name, *held)).collect(),
            forgotten: self
                .state
                .forgotten
                .iter()
                .map(|(&client, &below)| (client, below))
                .collect(),
            promises: Vec::new(),
        }
    }

    /// Takes over what a peer knows of names.
    pub(in crate::ocean_vista) fn learn_names(
        &mut self,
        names: &[((ClientId, u64), Name)],
        world: &mut World<'_, '_>,
    ) {
        let news: Vec<_> =
            names.iter().filter(|(name, told)| self.state.is_news(*name, told)).copied().collect();
        for news in news.chunks(names_max(world)) {
            self.change(Change::Names(news.to_vec()), world);
        }
    }

    /// Takes over what a peer has forgotten: whoever replaces a replica forgets no less.
    pub(in crate::ocean_vista) fn learn_forgotten(
        &mut self,
        forgotten: &[(ClientId, u64)],
        world: &mut World<'_, '_>,
    ) {
        let is_news = |&&(client, below): &&(ClientId, u64)| {
            crate::acknowledged::below(&self.state.forgotten, client) < below
        };
        let news: Vec<(ClientId, u64)> = forgotten.iter().filter(is_news).copied().collect();
        for news in news.chunks(names_max(world)) {
            self.change(Change::Forget(news.to_vec()), world);
        }
    }

    /// Settled versions of these partitions are all here now: what is pending of them is over. A
    /// transaction stays while another partition that it writes was not copied so far.
    pub(in crate::ocean_vista) fn drop_covered(
        &mut self,
        from: Timestamp,
        covered: &Covered,
        world: &mut World<'_, '_>,
    ) {
        let is_over = |(ts, image): &(&Timestamp, &Image)| {
            let partitions = image.functor.writes.iter().map(|key| world.cluster.partition_of(key));
            let mut held = partitions.filter(|partition| self.held.contains(partition));
            held.all(|partition| {
                let covered = covered.get(&partition);
                covered.is_some_and(|(below, open)| *ts < below && !open.contains(ts))
            })
        };
        let over = self.state.pending.range(from..).filter(is_over).map(|(ts, _)| *ts);
        let over: Vec<Timestamp> = over.collect();
        for (&partition, (below, _)) in covered {
            let copied = self.state.copied.entry(partition).or_default();
            *copied = (*copied).max(*below);
            self.checks.begin(partition, *below);
        }
        for ts in over {
            self.unresolved.remove(&ts);
            self.unexecuted.remove(&ts);
            if let Some(functor) = self.state.pending.get(&ts).map(|image| image.functor.clone()) {
                self.unindex(ts, &functor);
            }
            self.state.drop(ts);
            self.wake(ts, world);
        }
    }

    /// What this node holds of an incarnation in a partition, for whoever takes it over.
    pub(in crate::ocean_vista) fn promise(
        &self,
        partition: PartitionId,
        task: Task,
        closed: Option<Closed>,
        world: &World<'_, '_>,
    ) -> Promise<Arc<Functor>> {
        let visible = world.marks.visible;
        let is_it = |(ts, image): &(&Timestamp, &Image)| {
            image.incarnation == task.incarnation && world.owner(**ts) == task.server
        };
        let writes = |image: &Image| {
            image.functor.writes.iter().any(|key| world.cluster.partition_of(key) == partition)
        };
        let all = self.state.pending.range(visible..).filter(is_it);
        let held = all.filter(|(_, image)| writes(image)).map(|(&ts, image)| {
            let mark = match image.phase {
                Phase::Tentative => Mark::Tentative,
                Phase::Finalized => Mark::Finalized,
                Phase::Aborted => Mark::Aborted,
            };
            (ts, Held { ballot: image.ballot, mark, functor: Some(image.functor.clone()) })
        });
        Promise { visible, closed, held: held.collect() }
    }

    /// Drops what did not survive of an incarnation. True if everything that did is here.
    pub(in crate::ocean_vista) fn close(
        &mut self,
        task: Task,
        closed: &Closed,
        world: &mut World<'_, '_>,
    ) -> bool {
        let first = closed.above.next();
        let is_void = |(ts, image): &(&Timestamp, &Image)| {
            image.incarnation == task.incarnation
                && world.owner(**ts) == task.server
                && image.ballot <= closed.ballot
                && image.phase != Phase::Aborted
                && !closed.survivors.contains(ts)
        };
        let void: Vec<(Timestamp, Arc<Functor>)> = self
            .state
            .pending
            .range(first..)
            .filter(is_void)
            .map(|(ts, image)| (*ts, image.functor.clone()))
            .collect();
        for (ts, functor) in void {
            world.cx.note(Note::Void);
            let (ballot, incarnation) = (closed.ballot, task.incarnation);
            self.change(Change::Abort { ts, ballot, incarnation, functor }, world);
            self.enter(ts, world.cluster);
            self.wake(ts, world);
        }
        let is_here = |ts: &Timestamp| {
            *ts < self.state.settled
                || self.state.pending.get(ts).is_some_and(|image| image.phase != Phase::Aborted)
        };
        closed.survivors.iter().all(is_here)
    }

    /// From which version on settled versions of a partition may be missing here, if those of
    /// others may be from `from` on: later if they were copied.
    pub(in crate::ocean_vista) fn lacks_from(
        &self,
        partition: PartitionId,
        from: Timestamp,
    ) -> Timestamp {
        let copied = self.state.copied.get(&partition).copied().unwrap_or_default();
        // What is pending here may have been settled by others since.
        let first = self.state.pending.keys().next().copied();
        from.max(first.map_or(copied, |first| first.min(copied)))
    }

    /// From here on this node may lack something, or have something to be rid of.
    pub(in crate::ocean_vista) fn first_open(&self) -> Timestamp {
        let first = self.state.pending.keys().next().copied();
        first.map_or(self.state.settled, |first| first.min(self.state.settled))
    }

    /// How many transactions are not settled.
    pub(in crate::ocean_vista) fn unsettled(&self) -> usize {
        self.state.pending.len()
    }
}
