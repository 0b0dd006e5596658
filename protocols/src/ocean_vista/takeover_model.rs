//! A model of takeovers ([`Takeover`]) with replicas that receive only some messages, a lost
//! coordinator that is still partly alive, and several new coordinators in higher ballots. It
//! checks that every answer to a client holds, and that all finished takeovers agree on what
//! survives.

use orthodrome_core::Wire;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, PartitionId};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time, Timestamp};
use orthodrome_core::topology::Topology;

use super::directory::Task;
use super::takeover::{
    Acceptor, Bookmark, Closed, Functor, Held, Mark, Message, Part, Promise, Stage, Takeover,
    Tellings, ToWrite,
};

/// The lost coordinator.
const LOST: NodeId = NodeId(1);
const VISIBLE: Timestamp = Timestamp(5);
const NOW: Time = Time::ZERO;
const WHOLE: Part = Part { moment: 1, from: Timestamp::ZERO, next: None };

/// A transaction: the partitions that it writes, and its id.
#[derive(Clone, PartialEq, Eq, Debug, Wire)]
struct Parts(OrdSet<PartitionId>, u32);

impl Functor for Parts {
    type Name = u32;

    fn name(&self) -> u32 {
        self.1
    }

    fn partitions(&self, _: &Cluster) -> OrdSet<PartitionId> {
        self.0.clone()
    }
}

/// Three replicas of each of two partitions, on four servers.
fn cluster() -> Cluster {
    let map = Topology::uniform(4, Duration::from_micros(500), Duration::from_millis(20));
    Cluster::spread(map, 1, 0, 2, 3).unwrap()
}

fn parts(partitions: &[u32]) -> Parts {
    named(partitions, 0)
}

fn named(partitions: &[u32], name: u32) -> Parts {
    Parts(partitions.iter().map(|&id| PartitionId(id)).collect(), name)
}

fn task(ballot: u64) -> Task {
    let (after, upto) = (Timestamp(1), Timestamp(1_000));
    Task { server: LOST, incarnation: 1, ballot, after, upto }
}

/// Deliberate mistakes of the model.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Broken {
    Nothing,
    /// Replicas accept messages that they promised to refuse.
    ForgetsPromises,
    /// A new coordinator aborts what it should write (V4).
    GivesUp,
    /// A new coordinator reports void versions only with the close.
    KeepsVoid,
}

#[derive(Debug, Default)]
struct Replica {
    acceptors: OrdMap<PartitionId, Acceptor>,
    held: OrdMap<Timestamp, Held<Parts>>,
    tellings: Tellings<Parts>,
}

impl Replica {
    fn allows(&self, at: Timestamp, ballot: u64) -> bool {
        let is_newer = self.held.get(&at).is_some_and(|held| held.ballot > ballot);
        !is_newer && self.acceptors.values().all(|a| a.allows(LOST, 1, ballot, at))
    }

    /// True if the transaction is known under another number: finally for its coordinator, for
    /// others as long as it is not aborted under that number.
    fn refuses(&self, at: Timestamp, ballot: u64, functor: &Parts) -> bool {
        !self.held.contains_key(&at)
            && self.held.iter().any(|(&other, held)| {
                let is_same = held.functor.as_ref().is_some_and(|held| held.1 == functor.1);
                is_same && other != at && (ballot == 0 || held.mark != Mark::Aborted)
            })
    }

    /// Marks a version, or acknowledges an equal or further mark; true if it does.
    fn mark(&mut self, at: Timestamp, ballot: u64, mark: Mark, functor: &Parts) -> bool {
        if !self.allows(at, ballot) {
            return false;
        }
        let held = self.held.get(&at).filter(|held| held.ballot == ballot);
        let old = held.map(|held| held.mark);
        let is_held = old.is_some_and(|old| old != Mark::Aborted);
        match (mark, old) {
            (Mark::Tentative | Mark::Finalized, Some(Mark::Aborted)) => return false,
            (Mark::Finalized, _) if !is_held => return false,
            (Mark::Tentative, _) if is_held => return true,
            (Mark::Tentative | Mark::Finalized | Mark::Aborted, _) => {}
        }
        let functor = Some(functor.clone());
        self.held.insert(at, Held { ballot, mark, functor });
        true
    }

    fn promise(&mut self, of: PartitionId, task: Task, broken: Broken) -> Option<Promise<Parts>> {
        let acceptor = self.acceptors.get_mut(&of)?;
        if broken == Broken::ForgetsPromises {
            acceptor.allows(LOST, 1, task.ballot, VISIBLE).then_some(())?;
        } else {
            acceptor.promise(LOST, 1, task.ballot).ok()?;
        }
        let closed = acceptor.closed(LOST, 1).cloned();
        let writes = |held: &Held<Parts>| held.functor.as_ref().is_some_and(|f| f.0.contains(&of));
        let held = self.held.iter().filter(|(_, held)| writes(held));
        let held = held.map(|(&at, held)| (at, held.clone())).collect();
        Some(Promise { visible: VISIBLE, closed, held })
    }

    fn close(&mut self, of: PartitionId, closed: &Closed) -> bool {
        let Some(acceptor) = self.acceptors.get_mut(&of) else { return false };
        if acceptor.close(LOST, 1, closed.clone()).is_err() {
            return false;
        }
        for (&at, held) in &mut self.held {
            if closed.voids(at) && held.ballot <= closed.ballot {
                (held.ballot, held.mark) = (closed.ballot, Mark::Aborted);
            }
        }
        true
    }
}

/// A version that is being written in one ballot, with the answers.
#[derive(Debug)]
struct Written {
    at: Timestamp,
    functor: Parts,
    ballot: u64,
    stored: OrdSet<NodeId>,
    finalized: OrdSet<NodeId>,
    aborted: OrdSet<NodeId>,
    refused: OrdSet<NodeId>,
    is_given_up: bool,
    /// True if a new coordinator need not write it.
    is_optional: bool,
}

impl Written {
    fn new(at: Timestamp, functor: Parts, ballot: u64) -> Self {
        let nobody = OrdSet::new;
        let (stored, finalized, aborted, refused) = (nobody(), nobody(), nobody(), nobody());
        let (is_given_up, is_optional) = (false, false);
        Self { at, functor, ballot, stored, finalized, aborted, refused, is_given_up, is_optional }
    }

    /// True if this number of the three replicas of each partition have answered so.
    fn everywhere(&self, said: &OrdSet<NodeId>, count: usize, cluster: &Cluster) -> bool {
        self.functor.0.iter().all(|&partition| {
            let placed = cluster.partition(partition).unwrap();
            placed.replicas.iter().filter(|&node| said.contains(node)).count() >= count
        })
    }

    /// Delivers a message to one replica, and possibly its answer.
    fn step(&mut self, world: &mut OrdMap<NodeId, Replica>, cluster: &Cluster, rng: &mut Rng) {
        let nodes: Vec<NodeId> = world.keys().copied().collect();
        let to = *rng.pick(&nodes).unwrap();
        let replica = world.get_mut(&to).unwrap();
        let is_replica = self.functor.0.iter().any(|part| replica.acceptors.contains_key(part));
        if !is_replica {
            return;
        }
        if !self.is_given_up && replica.refuses(self.at, self.ballot, &self.functor) {
            if rng.chance(3, 4) {
                self.refused.insert(to);
            }
            return;
        }
        // FINALIZE follows a majority of each partition.
        let may_finalize = self.everywhere(&self.stored, 2, cluster);
        let (mark, said) = if self.is_given_up {
            (Mark::Aborted, &mut self.aborted)
        } else if may_finalize && self.stored.contains(&to) {
            (Mark::Finalized, &mut self.finalized)
        } else {
            (Mark::Tentative, &mut self.stored)
        };
        let heard = replica.mark(self.at, self.ballot, mark, &self.functor);
        if heard && rng.chance(3, 4) {
            said.insert(to);
            self.refused.remove(&to);
        }
    }

    /// True if a majority of one partition refuses it; for an optional one, if any replica does.
    fn is_refused(&self, cluster: &Cluster) -> bool {
        let all = self.functor.0.iter().map(|&partition| cluster.partition(partition).unwrap());
        let refused = |node: &&NodeId| self.refused.contains(node);
        let enough = if self.is_optional { 1 } else { 2 };
        all.into_iter().any(|placed| placed.replicas.iter().filter(refused).count() >= enough)
    }
}

/// A new coordinator.
struct Heir {
    takeover: Takeover<Parts>,
    writes: Vec<Written>,
    survivors: Option<OrdSet<Timestamp>>,
}

struct World {
    cluster: Cluster,
    replicas: OrdMap<NodeId, Replica>,
    /// The open transactions of the lost coordinator, as far as it knows.
    flights: Vec<Written>,
    heirs: Vec<Heir>,
    rng: Rng,
    broken: Broken,
}

impl World {
    fn new(seed: u64, broken: Broken) -> Self {
        let cluster = cluster();
        let mut replicas: OrdMap<NodeId, Replica> = OrdMap::new();
        for placed in cluster.partitions() {
            for &node in &placed.replicas {
                let replica = replicas.entry(node).or_default();
                replica.acceptors.insert(placed.id, Acceptor::default());
            }
        }
        // The last two have the same id.
        let all = [[0].as_slice(), &[1], &[0, 1], &[0, 1], &[0, 1], &[0, 1]];
        let flights = all.iter().zip(1..);
        let flights = flights.map(|(of, at)| {
            let name = u32::try_from(at).unwrap().min(5);
            Written::new(Timestamp(10 * at), named(of, name), 0)
        });
        let (flights, heirs) = (flights.collect(), Vec::new());
        Self { cluster, replicas, flights, heirs, rng: Rng::stream(seed, "heirs", 0), broken }
    }

    /// A random step of the lost coordinator.
    fn coordinate(&mut self) {
        let Self { cluster, replicas, flights, rng, .. } = self;
        let at = usize::try_from(rng.below(flights.len() as u64)).unwrap();
        let flight = &mut flights[at];
        let is_stored = flight.everywhere(&flight.stored, 3, cluster)
            || flight.everywhere(&flight.finalized, 2, cluster);
        if !is_stored && rng.chance(1, 20) {
            flight.is_given_up = true;
        }
        flight.step(replicas, cluster, rng);
    }

    /// A new coordinator begins, in a higher ballot than all before.
    fn begin(&mut self) {
        let ballot = 8 + self.heirs.len() as u64;
        let mut known = OrdMap::new();
        for flight in &self.flights {
            // A backup knows what its messages have reported.
            if self.rng.chance(1, 3) {
                known.insert(flight.at, flight.functor.clone());
            }
        }
        let takeover = Takeover::new(task(ballot), &self.cluster, known, VISIBLE, NOW);
        self.heirs.push(Heir { takeover, writes: Vec::new(), survivors: None });
    }

    /// A random step of a new coordinator.
    fn inherit(&mut self, at: usize) {
        let Self { cluster, replicas, heirs, rng, broken, .. } = self;
        let Heir { takeover, writes, survivors } = &mut heirs[at];
        if takeover.stage() == Stage::Writes {
            let void: Vec<_> = takeover.void().map(|(at, parts)| (at, parts.clone())).collect();
            if let Some((at, functor)) = rng.pick(&void)
                && rng.chance(1, 4)
                && *broken != Broken::KeepsVoid
            {
                let ballot = takeover.task().ballot;
                Written { is_given_up: true, ..Written::new(*at, functor.clone(), ballot) }
                    .step(replicas, cluster, rng);
                return;
            }
            let at = usize::try_from(rng.below(writes.len() as u64)).unwrap();
            if *broken == Broken::GivesUp && rng.chance(1, 8) {
                takeover.on_refused(writes.remove(at).at, NOW);
                return;
            }
            writes[at].step(replicas, cluster, rng);
            if writes[at].everywhere(&writes[at].finalized, 2, cluster) {
                takeover.on_written(writes.remove(at).at, NOW);
            } else if writes[at].is_refused(cluster) {
                takeover.on_refused(writes.remove(at).at, NOW);
            }
            return;
        }
        let round = takeover.round();
        let Some((to, msg)) = rng.pick(&round).cloned() else { return };
        let Some(replica) = replicas.get_mut(&to) else { return };
        match msg {
            Message::Promise { partition, task, after } => {
                let Some(held) = replica.promise(partition, task, *broken) else { return };
                // Two new coordinators may ask at the same time; each has its own ballot.
                let heir = NodeId(task.ballot as u32);
                let of = (partition, task);
                // A version in each piece, in any order.
                let mut pieces = replica.tellings.tell(heir, of, after, 1, || held);
                rng.shuffle(&mut pieces);
                pieces.retain(|_| rng.chance(3, 4));
                let mut all = Vec::new();
                for (part, piece) in pieces {
                    all.extend(takeover.on_promised(to, of, part, piece, cluster, NOW));
                }
                let begin = |ToWrite { at, functor, is_optional }: ToWrite<Parts>| Written {
                    is_optional,
                    ..Written::new(at, functor, task.ballot)
                };
                writes.extend(all.into_iter().map(begin));
            }
            Message::Close { partition, task, closed } => {
                let before = survivors.get_or_insert_with(|| closed.survivors.clone());
                assert_eq!(*before, closed.survivors, "it changed its mind");
                if replica.close(partition, &closed) && rng.chance(3, 4) {
                    takeover.on_closed(to, partition, task);
                }
            }
            Message::Promised { .. } | Message::Closed { .. } | Message::AskClose { .. } => {
                unreachable!("a new coordinator does not send this")
            }
        }
    }

    /// Compares the answers to clients with the results.
    fn check(&self) -> Result<(usize, usize), String> {
        let finished = self.heirs.iter().filter(|heir| heir.takeover.stage() == Stage::Finished);
        let all: OrdSet<_> = finished.filter_map(|heir| heir.survivors.clone()).collect();
        if all.len() != 1 {
            return Err(format!("they do not agree: {all:?}"));
        }
        let survivors = all.first().unwrap();
        let (mut committed, mut aborted) = (0, 0);
        for flight in &self.flights {
            let is_aborted = flight.everywhere(&flight.aborted, 2, &self.cluster);
            let is_stored = flight.everywhere(&flight.stored, 3, &self.cluster)
                || flight.everywhere(&flight.finalized, 2, &self.cluster);
            committed += usize::from(is_stored && !flight.is_given_up);
            aborted += usize::from(is_aborted);
            let survives = survivors.contains(&flight.at);
            if is_stored && !flight.is_given_up && !survives {
                return Err(format!("{} was told committed, and is void", flight.at));
            }
            if is_aborted && survives {
                return Err(format!("{} was told aborted, and survives", flight.at));
            }
        }
        Ok((committed, aborted))
    }
}

fn run(seed: u64, broken: Broken) -> Result<(usize, usize), String> {
    let mut world = World::new(seed, broken);
    for _ in 0..world.rng.below(60) {
        world.coordinate();
    }
    if world.rng.chance(1, 2) {
        // One more server is lost; every partition keeps two replicas of three.
        let nodes: Vec<NodeId> = world.replicas.keys().copied().collect();
        world.replicas.remove(world.rng.pick(&nodes).unwrap());
    }
    let heirs = 1 + world.rng.below(3);
    for _ in 0..100_000 {
        let begun = world.heirs.len() as u64;
        if begun < heirs && world.rng.chance(1, 20) {
            world.begin();
        }
        if world.rng.chance(1, 4) {
            world.coordinate();
        }
        let count = world.heirs.len() as u64;
        if count > 0 {
            let at = usize::try_from(world.rng.below(count)).unwrap();
            world.inherit(at);
        }
        let is_over =
            world.heirs.last().is_some_and(|heir| heir.takeover.stage() == Stage::Finished);
        if is_over && count == heirs {
            return world.check();
        }
    }
    Err("the last one never finished".into())
}

/// A node that took over two servers asked each replica for both, and neither promise ever had a
/// second half.
#[test]
fn a_node_may_be_told_two_long_promises_at_once() {
    let long = || {
        let held = Held { ballot: 1, mark: Mark::Finalized, functor: Some(parts(&[0])) };
        let held = (1..=6).map(|at| (Timestamp(at), held.clone())).collect();
        Promise { visible: Timestamp::ZERO, closed: None, held }
    };
    let mut tellings: Tellings<Parts> = Tellings::new(7);
    let mut tell = |server, after| {
        let task = Task { server: NodeId(server), ..task(3) };
        let pieces = tellings.tell(NodeId(9), (PartitionId(0), task), after, 1, long);
        let (last, _) = pieces.last().unwrap();
        (last.moment, pieces.len())
    };
    let [first, second] = [5, 6].map(|server| tell(server, None));
    assert_eq!((first.1, second.1), (6, 6));
    for (server, (moment, _)) in [(5, first), (6, second)] {
        let after = Bookmark { moment, next: Timestamp(3) };
        assert_eq!(tell(server, Some(after)), (moment, 4), "server {server} goes on");
    }
}

#[test]
fn what_was_told_stands_and_all_who_finish_agree() {
    let (mut committed, mut aborted) = (0, 0);
    for seed in 0..3_000 {
        let told =
            run(seed, Broken::Nothing).unwrap_or_else(|error| panic!("seed {seed}: {error}"));
        committed += told.0;
        aborted += told.1;
    }
    assert!(committed > 1_000 && aborted > 100, "{committed} {aborted}");
}

#[test]
fn mistakes_are_caught() {
    for broken in [Broken::ForgetsPromises, Broken::GivesUp, Broken::KeepsVoid] {
        let caught = (0..500).find_map(|seed| run(seed, broken).err());
        assert!(caught.is_some(), "{broken:?} was not caught");
    }
}

#[test]
fn nothing_happens_before_a_majority_of_every_partition_has_spoken() {
    let cluster = cluster();
    let mut takeover = Takeover::<Parts>::new(task(8), &cluster, OrdMap::new(), VISIBLE, NOW);
    let all = takeover.round();
    assert_eq!(all.len(), 6, "three replicas of each of two partitions");
    let nothing = || Promise { visible: VISIBLE, closed: None, held: OrdMap::new() };
    let replicas = |of: u32| cluster.partition(PartitionId(of)).unwrap().replicas.clone();
    let promise = |takeover: &mut Takeover<Parts>, from, of: u32, ballot| {
        takeover.on_promised(from, (PartitionId(of), task(ballot)), WHOLE, nothing(), &cluster, NOW)
    };
    let outsider = *replicas(1).iter().find(|node| !replicas(0).contains(node)).unwrap();
    for (from, of, ballot) in [(replicas(0)[0], 0, 7), (outsider, 0, 8), (replicas(0)[0], 0, 8)] {
        // Promises of another ballot, from no replica, and twice: counted once at most.
        promise(&mut takeover, from, of, ballot);
        promise(&mut takeover, from, of, ballot);
    }
    assert_eq!(takeover.round().len(), 5);
    for (node, of) in [(replicas(0)[1], 0), (replicas(1)[0], 1)] {
        promise(&mut takeover, node, of, 8);
        assert_eq!(takeover.stage(), Stage::Promises);
    }
    promise(&mut takeover, replicas(1)[1], 1, 8);
    assert_eq!(takeover.stage(), Stage::Closes, "nothing is to be written");
    for (node, of) in [(replicas(0)[0], 0), (replicas(0)[1], 0), (replicas(1)[0], 1)] {
        assert!(!takeover.on_closed(node, PartitionId(of), task(8)));
        assert!(!takeover.on_closed(node, PartitionId(of), task(8)), "twice is once");
    }
    assert!(!takeover.on_closed(replicas(1)[1], PartitionId(1), task(7)), "another ballot");
    assert!(takeover.on_closed(replicas(1)[1], PartitionId(1), task(8)));
    assert_eq!((takeover.stage(), takeover.round().len()), (Stage::Finished, 0));
}

#[test]
fn pieces_of_different_moments_do_not_mix() {
    let cluster = cluster();
    let mut takeover = Takeover::<Parts>::new(task(8), &cluster, OrdMap::new(), VISIBLE, NOW);
    let of = (PartitionId(0), task(8));
    let node = cluster.partition(of.0).unwrap().replicas[0];
    let held = |mark, ats: [u64; 3]| {
        let one = |at| (Timestamp(at), Held { ballot: 0, mark, functor: Some(parts(&[0])) });
        Promise { visible: VISIBLE, closed: None, held: ats.map(one).into() }
    };
    let ask = |takeover: &Takeover<Parts>| {
        let round = takeover.round();
        let (_, msg) = round.into_iter().find(|(to, msg)| {
            *to == node && matches!(msg, Message::Promise { partition, .. } if *partition == of.0)
        })?;
        let Message::Promise { after, .. } = msg else { unreachable!("it was looked for") };
        Some(after)
    };
    let hear = |takeover: &mut Takeover<Parts>, (part, piece): &(Part, Promise<Parts>)| {
        takeover.on_promised(node, of, *part, piece.clone(), &cluster, NOW);
    };
    let mut before = Tellings::new(100);
    let mut tell =
        |from| before.tell(NodeId(9), of, from, 1, || held(Mark::Tentative, [10, 20, 30]));
    let pieces = tell(ask(&takeover).unwrap());
    assert_eq!(pieces.len(), 3);
    // The second piece is lost: it and the following ones are requested again, of the same moment.
    for piece in [&pieces[2], &pieces[0], &pieces[0], &pieces[2]] {
        hear(&mut takeover, piece);
    }
    let rest = tell(ask(&takeover).unwrap());
    assert_eq!((rest.len(), rest[0].0.moment, rest[0].0.from), (2, 101, Timestamp(20)));

    // The replica restarts and has forgotten the moment: it begins with a new one, and late pieces
    // of the old one do not count.
    let mut after = Tellings::new(200);
    let mut tell = |from| after.tell(NodeId(9), of, from, 1, || held(Mark::Aborted, [11, 20, 31]));
    let anew = tell(ask(&takeover).unwrap());
    assert_eq!((anew.len(), anew[0].0.moment, anew[0].0.from), (3, 201, Timestamp::ZERO));
    for piece in [&anew[0], &rest[0], &anew[2], &rest[1]] {
        hear(&mut takeover, piece);
    }
    assert!(ask(&takeover).is_some(), "a piece is missing");
    hear(&mut takeover, &anew[1]);
    assert_eq!(ask(&takeover), None, "all was told");
    hear(&mut takeover, &pieces[0]);
    let promised = takeover.promised(of.0);
    let all: Vec<_> = promised.iter().flat_map(|told| &told.held).collect();
    assert_eq!(all.len(), 3);
    assert!(all.iter().all(|(_, held)| held.mark == Mark::Aborted), "{all:?}");

    assert_eq!(after.len(), 1);
    after.forget(|partition, telling| (partition, *telling) == of);
    assert!(after.is_empty());
}

#[test]
fn it_asks_again_those_who_owe_an_answer_after_a_while() {
    let (cluster, timeout) = (cluster(), Duration::from_millis(100));
    let mut takeover = Takeover::<Parts>::new(task(8), &cluster, OrdMap::new(), VISIBLE, NOW);
    assert!(!takeover.is_due(timeout, Time::from_millis(99)));
    assert!(takeover.is_due(timeout, Time::from_millis(100)));
    assert!(!takeover.is_due(timeout, Time::from_millis(299)), "twice as patient");
    assert!(takeover.is_due(timeout, Time::from_millis(300)));
    assert_eq!(takeover.round().len(), 6);
}

#[test]
fn what_a_backup_knows_is_written_unless_it_was_given_up_or_decided_before() {
    let cluster = cluster();
    let at = |number| (Timestamp(number), parts(&[0]));
    // Decided before; known; known and given up somewhere; above what the incarnation may create.
    let known = OrdMap::from([at(4), at(10), at(20), at(2_000)]);
    let mut takeover = Takeover::new(task(8), &cluster, known, VISIBLE, NOW);
    let mut writes = Vec::new();
    for of in [PartitionId(0), PartitionId(1)] {
        for &from in cluster.partition(of).unwrap().replicas.iter().take(2) {
            let functor = Some(parts(&[0]));
            let held = Held { ballot: 0, mark: Mark::Aborted, functor };
            let promise = Promise {
                visible: VISIBLE,
                closed: None,
                held: OrdMap::from([(Timestamp(20), held)]),
            };
            let of = (of, task(8));
            writes.extend(takeover.on_promised(from, of, WHOLE, promise, &cluster, NOW));
        }
    }
    let functor = parts(&[0]);
    assert_eq!(writes, [ToWrite { at: Timestamp(10), functor, is_optional: true }]);
    assert_eq!((takeover.stage(), takeover.round().len()), (Stage::Writes, 0));
    assert!(takeover.on_written(Timestamp(10), NOW));
    let round = takeover.round();
    let Some((_, Message::Close { closed, .. })) = round.first() else { panic!("{round:?}") };
    assert_eq!(closed.survivors, OrdSet::from([Timestamp(10)]));
    assert_eq!(closed.above, Timestamp(4), "just below the watermark");
    assert!(closed.voids(Timestamp(20)) && !closed.voids(Timestamp(4)));
}
