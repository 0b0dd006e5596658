//! How a replica that lacks visible versions gets them: from f + 1 replicas, by the rule for readers
//! (§5.3, V9).

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::time::Timestamp;

use super::Note;
use super::message::Msg;
use super::replica::Replica;
use super::server::World;
use super::state::{Image, Phase};
use crate::waiting::Asked;

/// What a node pulls.
#[derive(Debug, Default)]
pub(super) struct Pulls {
    round: u64,
    current: Option<Pull>,
}

/// One range of versions.
#[derive(Debug)]
struct Pull {
    round: u64,
    from: Timestamp,
    to: Timestamp,
    /// Coordinators that miss this node's word, and of what.
    told: BTreeMap<NodeId, (Timestamp, Timestamp)>,
    open: BTreeMap<PartitionId, BTreeMap<NodeId, Answer>>,
    asked: Asked,
}

/// What a peer holds in the range.
#[derive(Debug)]
struct Answer {
    replicated: Timestamp,
    entries: BTreeMap<Timestamp, Image>,
}

impl Pulls {
    /// A coordinator has not heard that this node holds what is visible in a range.
    pub(super) fn on_missing(
        &mut self,
        coordinator: NodeId,
        (from, to): (Timestamp, Timestamp),
        replica: &mut Replica,
        world: &mut World<'_, '_>,
    ) {
        if to >= world.marks.visible || self.current.is_some() {
            // It will say so again.
            return;
        }
        world.cx.note(Note::Pulled);
        self.round += 1;
        let open = replica.held().iter().map(|&partition| (partition, BTreeMap::new())).collect();
        let told = [(coordinator, (from, to))].into();
        let asked = Asked::new(world.cx.now());
        self.current = Some(Pull { round: self.round, from, to, told, open, asked });
        self.send(world);
        self.advance(replica, world);
    }

    fn send(&self, world: &mut World<'_, '_>) {
        let Some(pull) = &self.current else { return };
        let (round, from, to) = (pull.round, pull.from, pull.to);
        for (&partition, answers) in &pull.open {
            let placed = world.cluster.partition(partition);
            for &peer in placed.into_iter().flat_map(|placed| &placed.replicas) {
                if !answers.contains_key(&peer) {
                    world.send(peer, Msg::Pull { partition, round, from, to });
                }
            }
        }
    }

    /// A peer says what it holds.
    pub(super) fn on_pulled(
        &mut self,
        peer: NodeId,
        (partition, round): (PartitionId, u64),
        replicated: Timestamp,
        entries: Vec<(Timestamp, Image)>,
        replica: &mut Replica,
        world: &mut World<'_, '_>,
    ) {
        let Some(pull) = &mut self.current else { return };
        if pull.round != round {
            return;
        }
        if let Some(answers) = pull.open.get_mut(&partition) {
            let entries = entries.into_iter().collect();
            answers.insert(peer, Answer { replicated, entries });
        }
        self.advance(replica, world);
    }

    /// Takes in what enough peers have told of.
    fn advance(&mut self, replica: &mut Replica, world: &mut World<'_, '_>) {
        let Some(pull) = &mut self.current else { return };
        let is_enough = |partition: &PartitionId, answers: &mut BTreeMap<NodeId, Answer>| {
            let all = world.cluster.partition(*partition).map_or(0, |p| p.replicas.len());
            answers.len() > all / 2
        };
        let complete: Vec<_> = pull.open.extract_if(.., is_enough).collect();
        for (_, answers) in complete {
            take_in(&answers, replica, world);
        }
        if pull.open.is_empty()
            && let Some(pull) = self.current.take()
        {
            for (coordinator, (from, to)) in pull.told {
                world.reply(coordinator, Msg::Have { from, to });
            }
        }
    }

    /// Asks again who has not answered.
    pub(super) fn on_sweep(&mut self, world: &mut World<'_, '_>) {
        let now = world.cx.now();
        let Some(pull) = &mut self.current else { return };
        if pull.asked.is_due(world.config.resend_after, now) {
            pull.asked = pull.asked.again(now);
            world.cx.note(Note::Resent);
            self.send(world);
        }
    }

    /// True if nothing is being pulled.
    pub(super) fn is_idle(&self) -> bool {
        self.current.is_none()
    }
}

/// Takes over what the answers of enough replicas come to.
fn take_in(answers: &BTreeMap<NodeId, Answer>, replica: &mut Replica, world: &mut World<'_, '_>) {
    // What some peer has settled, this node holds too: it was not settled without it.
    let settled = answers.values().map(|answer| answer.replicated).max().unwrap_or_default();
    let all = answers.values().flat_map(|answer| answer.entries.keys());
    let versions: BTreeSet<Timestamp> = all.filter(|ts| **ts >= settled).copied().collect();
    for ts in versions {
        let held = || answers.values().filter_map(|answer| answer.entries.get(&ts));
        let Some(ballot) = held().map(|image| image.ballot).max() else { continue };
        let of_ballot = || held().filter(|image| image.ballot == ballot);
        let is_aborted = of_ballot().any(|image| image.phase == Phase::Aborted);
        let mine = replica.state.pending.get(&ts);
        let is_known = mine.is_some_and(|mine| {
            mine.ballot == ballot && (mine.phase == Phase::Aborted) == is_aborted
        });
        let decided = of_ballot().find(|image| (image.phase == Phase::Aborted) == is_aborted);
        if let (false, Some(image)) = (is_known, decided) {
            let mut image = image.clone();
            image.output = held().find_map(|image| image.output.clone()).filter(|_| !is_aborted);
            replica.adopt(ts, image, world);
        }
    }
}
