//! Versions that every replica has are settled: they move from the record to the store, and old ones
//! are collected.

use std::collections::BTreeMap;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::digest::Digest;
use orthodrome_core::id::{PartitionId, TxnId};
use orthodrome_core::machine::Claim;
use orthodrome_core::time::Timestamp;
use orthodrome_core::txn::{Outcome, Version};

use super::Replica;
use crate::ocean_vista::server::World;
use crate::ocean_vista::state::{Fate, Phase};

impl Replica {
    /// The watermarks have moved: what every replica holds is moved to the store, tombstones go.
    pub(in crate::ocean_vista) fn settle(&mut self, world: &mut World<'_, '_>) {
        let least = self.held.iter().map(|&id| world.marks.replicated(id)).min();
        let to = least.unwrap_or(Timestamp::MAX).min(world.marks.visible);
        if to <= self.state.settled {
            return;
        }
        let from = std::mem::replace(&mut self.state.settled, to);
        if from == Timestamp::ZERO {
            // Nothing is compared of what was before.
            self.held.iter().for_each(|&partition| self.checks.begin(partition, to));
        }
        self.state.copied.retain(|_, copied| *copied > to);
        let passed: Vec<Timestamp> =
            self.state.pending.range(from..to).map(|(ts, _)| *ts).collect();
        for ts in passed {
            self.settle_one(ts, world);
        }
    }

    pub(super) fn settle_one(&mut self, ts: Timestamp, world: &mut World<'_, '_>) {
        // That its output is durable is awaited all the same.
        let is_awaited = self.unexecuted.contains(&ts);
        let Some((txn, fate)) = self.store_final(ts, world.cluster) else { return };
        if is_awaited {
            self.unexecuted.insert(ts);
        }
        if let Fate::Ended(outcome) = fate {
            world.cx.claim(Claim::Decided { txn, outcome });
        }
    }

    /// Takes a transaction out of what is pending if it is known what it comes to, and moves that
    /// to the store.
    pub(super) fn store_final(
        &mut self,
        ts: Timestamp,
        cluster: &Cluster,
    ) -> Option<(TxnId, Fate)> {
        let image = self.state.pending.get(&ts)?;
        let fate = match (image.phase, image.output.as_deref()) {
            // Other numbers may have been given to this name, and one of them may be there.
            (Phase::Aborted, _) => Fate::Refused { is_final: false },
            (Phase::Tentative | Phase::Finalized, None) => return None,
            (Phase::Tentative | Phase::Finalized, Some(Ok(_))) => {
                Fate::Ended(Outcome::Committed(ts))
            }
            (Phase::Tentative | Phase::Finalized, Some(Err(reason))) => {
                Fate::Ended(Outcome::Aborted(*reason))
            }
        };
        let image = self.leave(ts)?;
        let txn = image.functor.txn;
        self.state.end(ts, &image, fate);
        if self.loses_writes && txn.counter.is_multiple_of(4) {
            return Some((txn, fate));
        }
        let mut digests: BTreeMap<PartitionId, Digest> = BTreeMap::new();
        for (key, value) in image.output.as_deref().into_iter().flatten().flatten() {
            let partition = cluster.partition_of(key);
            if self.held.contains(&partition) {
                let digest = digests.entry(partition).or_default();
                digest.add(ts.0);
                digest.add_bytes(&key.0);
                digest.add(u64::from(value.is_some()));
                if let Some(value) = value {
                    digest.add_bytes(&value.0);
                }
                let version = Version { timestamp: ts, writer: txn };
                self.store.put(partition, key.clone(), version, value.clone());
            }
        }
        for (partition, digest) in digests {
            self.checks.add(partition, ts, digest.value());
        }
        Some((txn, fate))
    }

    /// What is settled, as far as all of it is computed, can be compared. Only if the replicas here
    /// are complete.
    pub(in crate::ocean_vista) fn close_spans(&mut self) {
        let first = self.state.pending.keys().next().copied();
        let below = first.map_or(self.state.settled, |first| first.min(self.state.settled));
        if below > Timestamp::ZERO {
            self.held.iter().for_each(|&partition| self.checks.close(partition, below));
        }
    }

    /// Before a checkpoint: lets the store drop what nobody will read any more (V11).
    pub(in crate::ocean_vista) fn collect(&mut self, world: &World<'_, '_>) {
        let bound = if world.config.mutations.collect_by_age() {
            world.marks.visible - world.config.version_retention
        } else {
            world.marks.collectable
        };
        self.state.collected = self.state.collected.max(bound);
        for &id in &self.held {
            self.store.collect_below(id, self.state.collected.next());
        }
        self.state.forget(world.config.retention);
    }
}
