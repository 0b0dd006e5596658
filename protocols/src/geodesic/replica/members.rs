//! A replica's part in changes of its group's members (D17, `docs/protocols/geodesic.md`).
//!
//! Any member takes an order. It proposes the next members in the register of the current ones, as a
//! coordinator of Paxos would: first a ballot, then what the answers allow. Once a majority has
//! accepted, the next epoch has begun, and everybody is told. The new member then waits until f + 1
//! others refuse what is left of the epoch before, and copies the partition as a server does that has
//! lost its disk: it is one, in the place of the member that has left.

use std::sync::Arc;

use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};

use super::super::Note;
use super::super::members::{Election, Members, has_no_twice, is_same};
use super::super::message::{Ballot, Change, Msg};
use super::super::server::World;
use super::{Rejoin, Replica};

/// What a replica knows of the members besides its durable state.
#[derive(Debug)]
pub(super) struct Moving {
    /// What an operator has ordered here, until it is carried out or another order is.
    order: Option<Vec<NodeId>>,
    /// This epoch may begin with members of another order that was given here before.
    after: u64,
    proposal: Option<Proposal>,
    /// The highest ballot that others have answered with.
    highest: Ballot,
    /// No proposal before this, because another member proposes.
    due: Time,
    /// Since when it knows these members.
    since: Time,
    /// The newest member takes part.
    is_newest_whole: bool,
    /// Since when it asks those who are to become members whether they are there.
    asked: Option<Time>,
    /// As a new member: since when it takes part.
    whole_since: Option<Time>,
}

/// A new member tells all servers so often that it takes part.
const TOLD_TIMES: u32 = 10;

/// The next members, as this replica proposes them.
#[derive(Debug)]
struct Proposal {
    ballot: Ballot,
    members: Arc<Members>,
    /// What those who have promised had accepted.
    promised: OrdMap<NodeId, Option<(Ballot, Arc<Members>)>>,
    /// Who has accepted. Nobody is asked for that before a majority has promised.
    accepted: Option<OrdSet<NodeId>>,
    began: Time,
    asked: Time,
}

impl Moving {
    pub(super) fn new(now: Time) -> Self {
        Self {
            order: None,
            after: 0,
            proposal: None,
            highest: Ballot::default(),
            due: now,
            since: now,
            is_newest_whole: false,
            asked: None,
            whole_since: None,
        }
    }
}

/// How far an order is.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in super::super) enum Reached {
    /// Not yet. The text says what it waits for.
    Pending(String),
    /// The group has these members, and all of them take part.
    Finished,
    /// The group follows another order.
    Overtaken,
}

impl Replica {
    /// The number of changes of members so far.
    pub(in super::super) fn epoch(&self) -> u64 {
        self.state.members.as_ref().map_or(0, |members| members.epoch)
    }

    /// The newest member, if it does not take part yet as far as this replica knows.
    fn unfinished(&self, me: NodeId) -> Option<NodeId> {
        let newest = self.state.members.as_ref()?.newest?;
        let is_whole = if newest == me { self.is_ready() } else { self.moving.is_newest_whole };
        (!is_whole).then_some(newest)
    }

    /// Who became a member last, if anybody did.
    pub(super) fn newest(&self) -> Option<NodeId> {
        self.state.members.as_ref()?.newest
    }

    /// Who should be members: as ordered last, if the members know that.
    fn target(&self) -> &[NodeId] {
        self.state.members.as_ref().map_or(&self.replicas, |members| &members.target)
    }

    /// The members.
    pub(in super::super) fn members(&self) -> &[NodeId] {
        &self.replicas
    }

    /// Who gets gossip: the peers; from a new member at first all servers, because a former member may
    /// have taken the order.
    pub(super) fn listeners(&self, world: &World<'_, '_>) -> Vec<NodeId> {
        let is_newest = self.newest() == Some(world.node);
        let is_new = self.moving.whole_since.is_some_and(|since| {
            world.cx.now().since(since) < world.config.gossip_interval * TOLD_TIMES
        });
        if !(is_newest && is_new) {
            return self.peers(world.node);
        }
        let all = world.cluster.servers().map(|server| server.id);
        all.filter(|&node| node != world.node).collect()
    }

    /// The copy is complete.
    pub(super) fn on_whole(&mut self, now: Time) {
        self.moving.whole_since = Some(now);
    }

    /// True if it is a new member that does not take part yet.
    pub(in super::super) fn joins(&self, me: NodeId) -> bool {
        self.unfinished(me) == Some(me)
    }

    /// Why these cannot be the next members, whoever is asked.
    pub(in super::super) fn refusal(&self, target: &[NodeId]) -> Option<String> {
        let wanted = self.replicas.len();
        if wanted < 3 {
            return Some(format!(
                "{} has one replica, and nobody else could send a copy of it",
                self.id
            ));
        }
        if target.len() != wanted || !has_no_twice(target) {
            return Some(format!(
                "{} has {wanted} replicas, and geodesic does not change their number: name {wanted} \
                 different servers",
                self.id
            ));
        }
        None
    }

    /// An operator's order.
    pub(in super::super) fn order(&mut self, target: Vec<NodeId>, world: &mut World<'_, '_>) {
        if self.moving.proposal.as_ref().is_some_and(|proposal| proposal.accepted.is_some()) {
            // That one may have been accepted by now.
            self.moving.after = self.epoch() + 1;
        } else {
            self.moving.proposal = None;
        }
        (self.moving.order, self.moving.asked) = (Some(target), None);
        self.pursue_members(world);
    }

    /// How far an order is that this replica has taken.
    pub(in super::super) fn progress(&self, target: &[NodeId], me: NodeId) -> Reached {
        let is_recorded = is_same(self.target(), target);
        let is_wanted = self.moving.order.as_ref().is_some_and(|order| is_same(order, target));
        if !is_recorded && !is_wanted {
            return Reached::Overtaken;
        }
        let unfinished = self.unfinished(me);
        if is_recorded && is_same(&self.replicas, target) {
            return match unfinished {
                Some(newest) => Reached::Pending(format!("{newest} copies {}", self.id)),
                None => Reached::Finished,
            };
        }
        let names = |nodes: &[NodeId], but: &[NodeId]| {
            let nodes = nodes.iter().filter(|node| !but.contains(node));
            nodes.map(NodeId::to_string).collect::<Vec<_>>().join(", ")
        };
        Reached::Pending(match (unfinished, is_recorded && self.moving.proposal.is_none()) {
            (Some(newest), true) => format!("{newest} copies {}; others follow", self.id),
            (_, false) => format!("members have to agree: {}", names(&self.replicas, &[])),
            (None, true) => format!("one has to answer: {}", names(target, &self.replicas)),
        })
    }

    /// The group has other members, and this replica is still one of them.
    pub(in super::super) fn adopt(&mut self, members: &Arc<Members>, world: &mut World<'_, '_>) {
        let before = self.newest();
        self.change(Change::Members(members.clone()), world);
        let now = world.cx.now();
        self.replicas.clone_from(&members.nodes);
        self.marks.retain(|node, _| members.nodes.contains(node));
        for &node in &members.nodes {
            self.marks.entry(node).or_insert((Default::default(), now));
        }
        self.leaving.retain(|node, _| members.nodes.contains(node));
        for told in self.fetching.values_mut() {
            told.retain(|node| members.nodes.contains(node));
        }
        let is_later = self.moving.after == members.epoch;
        let order = self.moving.order.take();
        let order = order.filter(|order| is_later || is_same(order, &members.target));
        // Another order of the same members changes nothing of this.
        let is_same_newest = before == members.newest;
        self.moving = Moving {
            order,
            highest: self.moving.highest,
            is_newest_whole: is_same_newest && self.moving.is_newest_whole,
            whole_since: self.moving.whole_since.filter(|_| is_same_newest),
            ..Moving::new(now)
        };
        self.copy_from_others(world);
    }

    /// A member takes part: it sends gossip only then.
    pub(super) fn on_member_heard(&mut self, from: NodeId) {
        self.moving.is_newest_whole |= self.newest() == Some(from);
    }

    /// Goes on with what was ordered, or with what another member has begun.
    pub(super) fn pursue_members(&mut self, world: &mut World<'_, '_>) {
        let now = world.cx.now();
        if let Some(proposal) = &self.moving.proposal {
            // Too few of those that would stay promise anything: perhaps another one should leave.
            let is_in_vain = proposal.accepted.is_none()
                && now.since(proposal.began) >= world.config.resend_after * 4;
            if !is_in_vain {
                if now.since(proposal.asked) >= world.config.resend_after {
                    self.propose(world);
                }
                return;
            }
            self.moving.proposal = None;
            self.locate(world);
        }
        if now < self.moving.due {
            return;
        }
        let Some(members) = self.next_members(world) else { return };
        world.cx.note(Note::Elected);
        let highest = self.moving.highest.max(self.state.election.promised);
        let ballot = Ballot {
            round: highest.round.saturating_add(1),
            node: world.node,
            incarnation: world.incarnation,
        };
        let (promised, accepted) = (OrdMap::new(), None);
        let proposal = Proposal { ballot, members, promised, accepted, began: now, asked: now };
        self.moving.proposal = Some(proposal);
        self.propose(world);
    }

    /// Members do not answer, so it asks the other servers.
    pub(super) fn locate(&self, world: &mut World<'_, '_>) {
        let (when, partition) = ((world.cx.now(), world.config.resend_after * 4), self.id);
        for to in world.locating.whom((world.cluster, partition), when) {
            world.send(to, Msg::Members { partition, members: None });
        }
    }

    /// So long another member may take for what it has begun.
    fn patience(&self, world: &World<'_, '_>) -> Duration {
        let at = self.replicas.iter().position(|&node| node == world.node).unwrap_or_default();
        world.config.takeover_after * u32::try_from(at + 1).unwrap_or(u32::MAX)
    }

    /// What this replica should propose now.
    fn next_members(&mut self, world: &mut World<'_, '_>) -> Option<Arc<Members>> {
        let now = world.cx.now();
        if let Some((_, accepted)) = &self.state.election.accepted {
            return Some(accepted.clone());
        }
        if let Some(order) = self.moving.order.take() {
            if !is_same(&order, self.target()) {
                // First all members learn of it: then no earlier order comes back.
                let (epoch, nodes) = (self.epoch() + 1, self.replicas.clone());
                let members =
                    Members { epoch, nodes, newest: self.newest(), target: order.clone() };
                self.moving.order = Some(order);
                return Some(Arc::new(members));
            }
            self.moving.order = Some(order);
        }
        let is_my_turn = now.since(self.moving.since) >= self.patience(world);
        if is_same(self.target(), &self.replicas) {
            self.moving.order = None;
            return None;
        }
        if self.moving.order.is_none() && !is_my_turn {
            return None;
        }
        let target = self.target().to_vec();
        let leaves = match self.unfinished(world.node) {
            // Two copies at once would have nobody to copy from.
            Some(newest) if target.contains(&newest) => return None,
            Some(newest) => newest,
            // First whoever is silent, and last this replica itself.
            None => {
                let heard = |node: &&NodeId| match **node == world.node {
                    true => (true, now),
                    false => (false, world.heard.get(*node).copied().unwrap_or(Time::ZERO)),
                };
                let leave = self.replicas.iter().filter(|node| !target.contains(node));
                *leave.min_by_key(heard)?
            }
        };
        let asked = *self.moving.asked.get_or_insert(now);
        let incoming = target.iter().copied().filter(|node| !self.replicas.contains(node));
        let incoming: Vec<NodeId> = incoming.collect();
        // A member that is not there would leave the group with one replica fewer.
        let is_there = |node: &&NodeId| world.heard.get(*node).is_some_and(|at| *at >= asked);
        let Some(&newest) = incoming.iter().find(is_there) else {
            for to in incoming {
                world.send(to, Msg::Ping);
            }
            return None;
        };
        let members = Members::after((self.epoch(), &self.replicas), (leaves, newest), &target);
        Some(Arc::new(members))
    }

    fn propose(&mut self, world: &mut World<'_, '_>) {
        let partition = self.id;
        let Some(proposal) = &mut self.moving.proposal else { return };
        proposal.asked = world.cx.now();
        let (ballot, is_final) = (proposal.ballot, proposal.accepted.is_some());
        for &to in &self.replicas {
            let has_answered = match &proposal.accepted {
                Some(accepted) => accepted.contains(&to),
                None => proposal.promised.contains_key(&to),
            };
            if !has_answered {
                let members = proposal.members.clone();
                world.send(to, Msg::Elect { partition, ballot, members, is_final });
            }
        }
    }

    /// A member proposes the next members.
    pub(super) fn on_elect(
        &mut self,
        from: NodeId,
        (ballot, is_final): (Ballot, bool),
        members: Arc<Members>,
        world: &mut World<'_, '_>,
    ) {
        let is_in_turn = match self.unfinished(world.node) {
            Some(newest) => !members.nodes.contains(&newest),
            None => true,
        };
        let follows = members.follow(self.epoch(), &self.replicas, self.newest());
        // A new member must find f + 1 that are whole.
        let is_order = is_same(&members.nodes, &self.replicas);
        let may_begin = is_order || is_in_turn && !self.is_incomplete();
        if !(self.replicas.contains(&from) && follows && (may_begin || is_final)) {
            return;
        }
        if from != world.node {
            self.moving.due = world.cx.now() + self.patience(world);
        }
        if ballot > self.state.election.promised
            || is_final && ballot == self.state.election.promised
        {
            self.change(Change::Elect(ballot, is_final.then_some(members)), world);
        }
        let (partition, election) = (self.id, Box::new(self.state.election.clone()));
        world.reply(from, Msg::Elected { partition, ballot, is_final, election });
    }

    /// A member says what it has promised and accepted.
    pub(super) fn on_elected(
        &mut self,
        from: NodeId,
        (ballot, is_final): (Ballot, bool),
        election: Election,
        world: &mut World<'_, '_>,
    ) {
        let majority = self.majority();
        let Some(proposal) = self.moving.proposal.as_mut().filter(|it| it.ballot == ballot) else {
            return;
        };
        if election.promised > ballot {
            // Another member proposes too. One of them should wait.
            let pause = world.config.resend_after;
            let jitter = Duration::from_nanos(world.cx.rng().below(1 + nanos(pause) * 2));
            self.moving.highest = self.moving.highest.max(election.promised);
            (self.moving.proposal, self.moving.due) = (None, world.cx.now() + pause + jitter);
            return;
        }
        match &mut proposal.accepted {
            None if !is_final => {
                proposal.promised.insert(from, election.accepted);
                // As many must stay as the new member has to copy from.
                let stay = proposal.members.nodes.iter();
                if stay.filter(|node| proposal.promised.contains_key(node)).count() < majority {
                    return;
                }
                let accepted = proposal.promised.values().flatten();
                if let Some((_, members)) = accepted.max_by_key(|(ballot, _)| *ballot) {
                    proposal.members = members.clone();
                }
                proposal.accepted = Some(OrdSet::new());
                self.propose(world);
            }
            Some(accepted) if is_final => {
                accepted.insert(from);
                if accepted.len() < majority {
                    return;
                }
                let (partition, members) = (self.id, proposal.members.clone());
                self.moving.proposal = None;
                // All servers, so that each of them can tell operators and clients.
                for to in world.cluster.servers() {
                    let members = Some(members.clone());
                    world.send(to.id, Msg::Members { partition, members });
                }
            }
            // An answer of the other phase.
            None | Some(_) => {}
        }
    }

    /// A new member asks this one to refuse what is left of the epoch before. It does, and that is
    /// durable before the answer leaves.
    pub(super) fn on_fence(&mut self, from: NodeId, world: &mut World<'_, '_>) {
        if from == world.node || !self.replicas.contains(&from) {
            return;
        }
        // What it has taken part in so far is not later than its clock allowed (R8), whatever that
        // said since.
        let texts = self.state.entries.values().filter_map(|entry| entry.text.as_ref());
        let latest = texts.map(|text| text.t).max().unwrap_or_default();
        let until = latest.max(Self::latest_allowed(world));
        world.reply(from, Msg::Fenced { partition: self.id, until });
    }

    /// As the new member: another one refuses what is left of the epoch before. In that it has a part
    /// in transactions up to `until`, and in no later ones.
    pub(super) fn on_fenced(&mut self, from: NodeId, until: Timestamp, world: &mut World<'_, '_>) {
        let (me, majority) = (world.node, self.majority());
        let is_peer = from != me && self.replicas.contains(&from);
        let Some(Rejoin::Fencing { fenced, .. }) = &mut self.rejoin else { return };
        if is_peer {
            fenced.insert(from, until);
        }
        if fenced.len() >= majority {
            let until = fenced.values().copied().max().unwrap_or_default();
            self.begin_copy(until, world);
        }
    }
}

#[cfg(test)]
mod tests {
    use orthodrome_core::cluster::Cluster;
    use orthodrome_core::id::PartitionId;
    use orthodrome_core::machine::{
        Admin, Effect, Input, Machine as _, OrderState, Protocol as _, Setup,
    };
    use orthodrome_core::store::MemoryEngine;
    use orthodrome_core::time::Clock;
    use orthodrome_core::topology::Topology;
    use orthodrome_core::workers::Alone;
    use orthodrome_core::{Host, Rng};

    use super::super::super::message::Inner;
    use super::super::super::{Geodesic, Server};
    use super::*;

    const P: PartitionId = PartitionId(0);

    /// Five servers. P begins on the first three.
    struct Servers {
        cluster: Arc<Cluster>,
        hosts: OrdMap<NodeId, Host<Geodesic, Server>>,
        /// Sender, receiver, message.
        sent: Vec<(NodeId, NodeId, Msg)>,
        millis: u64,
    }

    impl Servers {
        fn new() -> Self {
            let map = Topology::uniform(5, Duration::from_millis(1), Duration::from_millis(10));
            let cluster = Arc::new(Cluster::spread(map, 1, 1, 1, 3).unwrap());
            let (hosts, sent) = (OrdMap::new(), Vec::new());
            let mut servers = Self { cluster, hosts, sent, millis: 1_000 };
            ALL.into_iter().for_each(|node| servers.restart(node, false));
            servers
        }

        /// With an empty disk.
        fn restart(&mut self, node: u32, is_replacement: bool) {
            let setup = Setup {
                node: NodeId(node),
                cluster: self.cluster.clone(),
                config: Arc::new(Geodesic::configure(&self.cluster, "geodesic")),
                engine: Box::new(MemoryEngine::default()),
                workers: Arc::new(Alone),
                is_replacement,
            };
            let rng = Rng::stream(self.millis, "test", node.into());
            let (now, clock) = Self::clock(self.millis);
            self.hosts.insert(NodeId(node), Host::start(setup, vec![], rng, now, clock));
        }

        fn clock(millis: u64) -> (Time, Clock) {
            let nanos = millis * 1_000_000;
            (Time(nanos), Clock { now: Timestamp(nanos), error: Duration::from_millis(1) })
        }

        /// Collects what a server has to say. Its disk is quick.
        fn drain(&mut self, node: NodeId) {
            let (now, clock) = Self::clock(self.millis);
            let host = self.hosts.get_mut(&node).unwrap();
            loop {
                let mut durable = None;
                for effect in host.drain() {
                    match effect {
                        Effect::Send { to, msg: Msg::Several(parts) } => {
                            let parts = parts.into_iter().map(|Inner(msg)| (node, to, msg));
                            self.sent.extend(parts);
                        }
                        Effect::Send { to, msg } => self.sent.push((node, to, msg)),
                        Effect::Persist { ticket, .. } | Effect::Checkpoint { ticket, .. } => {
                            durable = Some(ticket);
                        }
                        Effect::Reads { .. }
                        | Effect::Finish { .. }
                        | Effect::Note(_)
                        | Effect::Claim(_) => {}
                    }
                }
                let Some(ticket) = durable else { return };
                host.step(now, clock, Input::Durable(ticket));
            }
        }

        fn order(&mut self, node: u32, voters: [u32; 3]) {
            let (now, clock) = Self::clock(self.millis);
            let (voters, learners) = (voters.map(NodeId).to_vec(), vec![]);
            let order = Admin::ChangeMembers { partition: P, voters, learners };
            self.hosts.get_mut(&NodeId(node)).unwrap().step(now, clock, Input::Admin(order));
            self.drain(NodeId(node));
        }

        /// Delivers what these servers say to each other, and what is `allowed`, for so long; the rest
        /// is lost.
        fn run(&mut self, millis: u64, servers: &[u32], allowed: impl Fn(NodeId, &Msg) -> bool) {
            for _ in 0..millis / 10 {
                self.millis += 10;
                let (now, clock) = Self::clock(self.millis);
                for node in servers.iter().copied().map(NodeId) {
                    self.hosts.get_mut(&node).unwrap().fire(now, clock);
                    self.drain(node);
                }
                for (from, to, msg) in std::mem::take(&mut self.sent) {
                    let are_up = [from, to].iter().all(|node| servers.contains(&node.0));
                    if are_up && allowed(to, &msg) {
                        let host = self.hosts.get_mut(&to).unwrap();
                        host.step(now, clock, Input::Message { from, msg });
                        self.drain(to);
                    }
                }
            }
        }

        /// The members that a server knows after a change.
        fn known(&self, node: u32) -> Option<Vec<u32>> {
            let groups = self.hosts[&NodeId(node)].machine().groups(Time::ZERO);
            groups.first().map(|group| group.voters.iter().map(|node| node.0).collect())
        }

        fn orders(&self, node: u32) -> Vec<OrderState> {
            let orders = self.hosts[&NodeId(node)].machine().orders();
            orders.into_iter().map(|order| order.state).collect()
        }
    }

    const ALL: [u32; 5] = [1, 2, 3, 4, 5];

    #[test]
    fn everybody_learns_of_a_change_and_the_new_member_takes_part() {
        let mut servers = Servers::new();
        servers.order(1, [1, 2, 4]);
        servers.run(10_000, &ALL, |_, _| true);
        for node in ALL {
            assert_eq!(servers.known(node), Some(vec![1, 2, 4]), "n{node}");
        }
        assert_eq!(servers.orders(1), [OrderState::Finished]);
    }

    #[test]
    fn what_a_majority_may_have_accepted_is_proposed_again() {
        let mut servers = Servers::new();
        servers.order(1, [1, 2, 4]);
        // n1 and n2 accept, and n1 dies before it knows that.
        let is_told =
            |msg: &Msg| matches!(msg, Msg::Elected { is_final: true, .. } | Msg::Members { .. });
        servers.run(2_000, &ALL, |to, msg| {
            let is_for_third = to == NodeId(3) && matches!(msg, Msg::Elect { is_final: true, .. });
            !is_told(msg) && !is_for_third
        });
        assert_eq!(ALL.map(|node| servers.known(node)), [const { None }; 5]);
        // n3 has an order of its own.
        servers.order(3, [2, 3, 5]);
        servers.run(20_000, &[2, 3, 4, 5], |_, _| true);
        assert!(matches!(servers.orders(3)[..], [OrderState::Failed(_)]));
        servers.run(20_000, &ALL, |_, _| true);
        for node in ALL {
            assert_eq!(servers.known(node), Some(vec![1, 2, 4]), "n{node}");
        }
    }

    /// Both are known to all members, whoever took them.
    #[test]
    fn a_later_order_ends_one_that_waits_elsewhere() {
        for target in [[1, 2, 3], [1, 2, 5]] {
            let mut servers = Servers::new();
            servers.order(1, [1, 2, 4]);
            servers.run(5_000, &[1, 2, 3, 5], |_, _| true);
            assert!(matches!(servers.orders(1)[..], [OrderState::Pending(_)]), "n4 is dead");
            servers.order(2, target);
            servers.run(10_000, &[1, 2, 3, 5], |_, _| true);
            assert_eq!(servers.orders(2), [OrderState::Finished]);
            assert!(matches!(servers.orders(1)[..], [OrderState::Failed(_)]));
            servers.run(10_000, &ALL, |_, _| true);
            assert_eq!(servers.known(1), Some(target.to_vec()));
        }
    }

    /// It has a new disk, and knows of other members only from its file. These are dead.
    #[test]
    fn a_former_member_with_a_new_disk_asks_everybody() {
        let mut servers = Servers::new();
        servers.order(1, [1, 4, 5]);
        servers.run(20_000, &ALL, |_, _| true);
        assert_eq!(servers.known(1), Some(vec![1, 4, 5]));
        servers.restart(2, true);
        servers.run(20_000, &[2, 4, 5], |_, _| true);
        assert_eq!(servers.known(2), Some(vec![1, 4, 5]));
    }

    #[test]
    fn a_server_that_does_not_answer_does_not_become_a_member() {
        let mut servers = Servers::new();
        servers.order(1, [1, 2, 4]);
        servers.run(20_000, &[1, 2, 3, 5], |_, _| true);
        assert_eq!(servers.known(1), Some(vec![1, 2, 3]));
        let [OrderState::Pending(what)] = &servers.orders(1)[..] else { panic!("it waits") };
        assert!(what.contains("n4"), "{what}");
        servers.run(10_000, &ALL, |_, _| true);
        assert_eq!(servers.orders(1), [OrderState::Finished]);
    }

    /// The one that would leave first is well, and the one that would stay dies.
    #[test]
    fn whoever_dies_meanwhile_leaves_first() {
        let mut servers = Servers::new();
        servers.order(1, [1, 4, 5]);
        servers.run(2_000, &ALL, |_, msg| !matches!(msg, Msg::Elected { .. }));
        assert_eq!(ALL.map(|node| servers.known(node)), [const { None }; 5]);
        for dead in [2, 3] {
            let mut servers = Servers::new();
            servers.order(1, [1, 4, 5]);
            servers.run(2_000, &ALL, |_, msg| !matches!(msg, Msg::Elected { .. }));
            let living = ALL.into_iter().filter(|node| *node != dead).collect::<Vec<_>>();
            servers.run(40_000, &living, |_, _| true);
            assert_eq!(servers.orders(1), [OrderState::Finished], "n{dead} is dead");
        }
    }

    /// n3 hears nothing of the change. It cannot make up a majority with a member that knows.
    #[test]
    fn a_former_member_that_does_not_know_is_refused() {
        let mut servers = Servers::new();
        servers.order(1, [1, 2, 4]);
        servers.run(10_000, &[1, 2, 4], |_, _| true);
        assert_eq!(servers.orders(1), [OrderState::Finished]);
        assert_eq!(servers.known(3), None);
        servers.order(3, [2, 3, 5]);
        servers.run(400, &ALL, |to, msg| {
            !matches!(msg, Msg::Under { .. } | Msg::Members { .. }) || to != NodeId(3)
        });
        assert_eq!(servers.known(1), Some(vec![1, 2, 4]));
        servers.run(2_000, &ALL, |_, _| true);
        assert_eq!(servers.known(3), Some(vec![1, 2, 4]));
        assert!(matches!(servers.orders(3)[..], [OrderState::Failed(_)]));
    }
}
