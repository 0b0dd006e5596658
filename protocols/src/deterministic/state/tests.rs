use orthodrome_core::Wire as _;
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::NodeId;
use orthodrome_core::ordered::OrdSet;
use orthodrome_core::rng::Rng;
use orthodrome_core::store::{MemoryEngine, PIECE_BYTES, Versions};
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_core::txn::{Key, Op, Version};
use orthodrome_core::workers::Alone;

use super::super::Ordering;
use super::super::message::{Due, Part, Turn};
use super::leaving::piece_from;
use super::*;
use crate::functor::{Body, Functor};

const CLIENTS: u64 = 3;

fn placement() -> Placement {
    let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
    Placement::new(Arc::new(Cluster::spread(map, 1, 1, 3, 3).unwrap()), Ordering::Regional)
}

/// The views of two servers that together hold all values.
fn shared_placements() -> [Placement; 2] {
    let map = Topology::uniform(3, Duration::from_millis(1), Duration::from_millis(10));
    let cluster = Cluster::spread(map, 2, 1, 3, 3).unwrap().divided(2).unwrap();
    let placement = Placement::new(Arc::new(cluster), Ordering::Regional);
    [1, 2].map(|node| placement.clone().seen_by(NodeId(node)))
}

/// A transaction of a few operations.
fn functor(number: u64, rng: &mut Rng) -> Functor {
    let (mut ops, mut reads, mut writes) = (Vec::new(), OrdSet::new(), OrdSet::new());
    for _ in 0..rng.range(1, 3) {
        let key = Key::from(format!("k{}", rng.below(9)));
        let (is_read, is_write, op) = match rng.below(4) {
            0 => (true, false, Op::Get(key.clone())),
            1 => (false, true, Op::Delete(key.clone())),
            2 => (false, true, Op::Put(key.clone(), format!("{number}").into())),
            _ => (true, true, Op::Append(key.clone(), format!(",{number}").into())),
        };
        ops.push(op);
        reads.extend(is_read.then(|| key.clone()));
        writes.extend(is_write.then_some(key));
    }
    let (reads, writes) = (reads.into_iter().collect(), writes.into_iter().collect());
    let txn = TxnId::new(ClientId(1 + number % CLIENTS), 1 + number / CLIENTS);
    Functor { txn, reads, writes, body: Body::Ops(ops), acknowledged_below: 0 }
}

/// Streams as a cluster could have them. A transaction for several streams enters each of them at a
/// different time. One server, which lags behind, assigns the homes of keys, learns outcomes, and
/// decides when a transaction is submitted again.
struct Drawing {
    logs: OrdMap<PartitionId, Vec<Command>>,
    on_way: Vec<(PartitionId, Arc<Sequenced>)>,
    submitted: Vec<Arc<Functor>>,
    relocated: OrdSet<(Key, u64)>,
    server: Held,
    clock: u64,
}

impl Drawing {
    fn draw(
        rng: &mut Rng,
        placement: &Placement,
        moves: bool,
    ) -> OrdMap<PartitionId, Vec<Command>> {
        let logs = placement.streams().into_iter().map(|stream| (stream, Vec::new())).collect();
        let mut drawing = Self {
            logs,
            on_way: Vec::new(),
            submitted: Vec::new(),
            relocated: OrdSet::new(),
            server: Held::new(placement),
            clock: 0,
        };
        for _ in 0..rng.range(40, 300) {
            match rng.below(13) {
                0..4 => drawing.submit(rng, placement),
                4 if moves => drawing.relocate(rng, placement),
                4 => {}
                5..9 => drawing.arrive(rng),
                _ => drawing.advance(rng, placement),
            }
        }
        for _ in 0..9 {
            while !drawing.on_way.is_empty() {
                drawing.arrive(rng);
            }
            drawing.forward(placement);
        }
        assert!(drawing.server.state.merge.is_empty());
        drawing.logs
    }

    /// Streams exchange acknowledgements, and transactions that are in one stream and not in
    /// another are forwarded (S6).
    fn forward(&mut self, placement: &Placement) {
        for stream in placement.streams() {
            self.catch_up(placement);
            let news = self.server.state.unacknowledged(stream);
            if !news.is_empty() {
                self.logs.get_mut(&stream).unwrap().push(Command::Acknowledge(news));
                continue;
            }
            let news = self.server.state.forgettable(stream);
            if !news.is_empty() {
                self.logs.get_mut(&stream).unwrap().push(Command::Forget(news));
            }
        }
        self.catch_up(placement);
        let state = &self.server.state;
        for entry in state.merge.incomplete_since(Time::MAX) {
            let missing = state.merge.missing(entry.name()).unwrap().into_iter();
            let missing = missing.filter(|stream| !state.is_sequenced(*stream, entry));
            self.on_way.extend(missing.map(|stream| (stream, entry.clone())));
        }
    }

    fn catch_up(&mut self, placement: &Placement) {
        for (&stream, log) in &self.logs {
            while (self.server.state.applied(stream).0 as usize) < log.len() {
                self.server.step(stream, log, placement);
            }
        }
    }

    fn submit(&mut self, rng: &mut Rng, placement: &Placement) {
        let number = self.submitted.len() as u64;
        let mut functor = Arc::new(functor(number, rng));
        if let Some(old) = rng.pick(&self.submitted).filter(|_| rng.clone().chance(1, 4))
            && self.server.state.ended.get(old.txn).is_none()
            && !self.server.state.is_acknowledged(old.txn)
        {
            functor = old.clone();
        } else {
            let knows = |functor: &&Arc<Functor>| {
                let state = &self.server.state;
                state.ended.get(functor.txn).is_some() || state.is_acknowledged(functor.txn)
            };
            let txn = functor.txn;
            let own = self.submitted.iter().filter(|other| other.txn.client == txn.client);
            let acknowledged_below = 1 + own.take_while(knows).count() as u64;
            functor = Arc::new(Functor { acknowledged_below, ..Functor::clone(&functor) });
            self.submitted.push(functor.clone());
        }
        let entry = Arc::new(self.server.state.plan(functor, RegionId(0), placement));
        self.on_way.extend(entry.homes.iter().map(|&home| (home, entry.clone())));
    }

    /// A key is to move. The stream to which it moves is informed when the stream from which it
    /// moves has the entry.
    fn relocate(&mut self, rng: &mut Rng, placement: &Placement) {
        let key = Key::from(format!("k{}", rng.below(9)));
        let from = self.server.state.home(&key, placement);
        let others = placement.streams().into_iter().filter(|&stream| stream != from.stream);
        let target = *rng.pick(&others.collect::<Vec<_>>()).unwrap();
        let entry = Arc::new(Sequenced::relocation(key, from, target, None));
        self.on_way.push((from.stream, entry));
    }

    fn arrive(&mut self, rng: &mut Rng) {
        if self.on_way.is_empty() {
            return;
        }
        let at = usize::try_from(rng.below(self.on_way.len() as u64)).unwrap();
        let (stream, entry) = self.on_way.swap_remove(at);
        if let (Some((key, from)), Some(target)) = (entry.relocates(), entry.target)
            && stream == from.stream
            && self.relocated.insert((key.clone(), from.counter))
        {
            self.on_way.push((target, entry.clone()));
        }
        self.clock += 1 + rng.below(20);
        let stamp = Timestamp(self.clock);
        let batch = Command::Batch { stamp, entries: vec![entry] };
        self.logs.get_mut(&stream).unwrap().push(batch);
    }

    /// The server merges some more entries.
    fn advance(&mut self, rng: &mut Rng, placement: &Placement) {
        let streams: Vec<PartitionId> = self.logs.keys().copied().collect();
        let stream = *rng.pick(&streams).unwrap();
        for _ in 0..rng.below(4) {
            if (self.server.state.applied(stream).0 as usize) < self.logs[&stream].len() {
                self.server.step(stream, &self.logs[&stream], placement);
            }
        }
    }
}

/// A server's state and data.
struct Held {
    state: State,
    store: Store,
    engine: MemoryEngine,
    /// The number of transactions that ran, that were void, and of keys that moved.
    counts: [usize; 3],
}

impl Held {
    fn new(placement: &Placement) -> Self {
        let engine = MemoryEngine::default();
        let state =
            State::new(&Image::default(), placement, Settings::default(), Arc::new(Alone), Time(0));
        Self { state, store: Store::new(Box::new(engine.clone())), engine, counts: [0; 3] }
    }

    /// The next entry of `stream`.
    fn step(
        &mut self,
        stream: PartitionId,
        log: &[Command],
        placement: &Placement,
    ) -> Vec<(Turn, Arc<Part>)> {
        let index = self.state.applied(stream).next();
        let command = log.get(usize::try_from(index.0 - 1).unwrap());
        let at = (stream, index);
        let applied = self.state.apply(at, command, placement, &mut self.store, Time(index.0));
        let Applied { ran, void, relocated, taken, .. } = applied;
        for (count, more) in self.counts.iter_mut().zip([ran.len(), void.len(), relocated]) {
            *count += more;
        }
        taken.into_iter().map(|(turn, _, part)| (turn, part)).collect()
    }

    /// Drops old versions and deletions, as a checkpoint does.
    fn collect(&mut self, placement: &Placement) {
        for (partition, below) in self.state.collectables(placement) {
            self.store.collect_below(partition, below);
        }
        let frozen = self.store.freeze();
        self.engine.merge(&frozen);
        self.store.thaw();
    }

    fn data(&self, placement: &Placement) -> Vec<(Key, Versions)> {
        let scan = |(partition, _)| self.store.scan(partition, None, usize::MAX);
        placement.partitions().flat_map(scan).collect()
    }

    /// Everything that must be equal on servers at the same position.
    fn essence(&self, placement: &Placement) -> (Image, Vec<(Key, Version, String)>) {
        let newest = self.data(placement).into_iter().filter_map(|(key, versions)| {
            let (version, value) = versions.last().cloned()?;
            Some((key, version, value?.to_string()))
        });
        let mut newest: Vec<_> = newest.collect();
        newest.sort();
        // Each server decides by itself how long it remembers that a transaction has run.
        (Image { ran: OrdSet::new(), ..self.state.image(placement) }, newest)
    }
}

/// Two servers are at different positions in each stream, and have forgotten independently.
/// Whichever takes the other's state gets the state of a server that has merged the longer prefix
/// of each stream, and continues like that one.
#[test]
fn joined_states_are_what_the_longer_prefixes_give() {
    let mut rng = Rng::stream(11, "join", 0);
    let placement = placement();
    let (mut neither, mut ran_by_join, mut waited, mut counts) = (0, 0, 0, [0; 3]);
    for _ in 0..300 {
        let logs = Drawing::draw(&mut rng, &placement, true);
        let streams: Vec<PartitionId> = logs.keys().copied().collect();
        let prefix = |rng: &mut Rng| -> OrdMap<PartitionId, u64> {
            let of = |(&stream, log): (_, &Vec<Command>)| (stream, rng.below(log.len() as u64 + 1));
            logs.iter().map(of).collect()
        };
        let (one, other) = (prefix(&mut rng), prefix(&mut rng));
        let both: OrdMap<PartitionId, u64> =
            one.iter().map(|(stream, &at)| (*stream, at.max(other[stream]))).collect();
        let mut run = |ends: &OrdMap<PartitionId, u64>, held: &mut Held, collects: bool| {
            loop {
                let open: Vec<PartitionId> = (streams.iter().copied())
                    .filter(|stream| held.state.applied(*stream).0 < ends[stream])
                    .collect();
                let Some(&stream) = rng.pick(&open) else { break };
                held.step(stream, &logs[&stream], &placement);
                if collects && rng.chance(1, 6) {
                    held.collect(&placement);
                }
            }
        };
        let mut held = [(); 4].map(|()| Held::new(&placement));
        let [a, b, whole, back] = &mut held;
        run(&one, a, true);
        run(&other, b, true);
        run(&both, whole, false);
        let is_ahead = |x: &OrdMap<_, u64>, y: &OrdMap<_, u64>| x.iter().all(|(s, at)| *at >= y[s]);
        neither += usize::from(!is_ahead(&one, &other) && !is_ahead(&other, &one));
        waited += usize::from(!a.state.merge.is_empty() && !b.state.merge.is_empty());
        // Another server at the position of the first.
        run(&one, back, true);
        let mut join = |to: &mut Held, from: &Held| {
            let (image, data) = (from.state.image(&placement), from.data(&placement));
            let joined = to.state.join(&image, data, &placement, &mut to.store, Time(1));
            ran_by_join += joined.ran.len();
            to.state.merge.assert_invariants();
            assert_eq!(to.essence(&placement), whole.essence(&placement));
            to.collect(&placement);
        };
        join(back, b);
        join(b, a);
        let ends: OrdMap<PartitionId, u64> =
            logs.iter().map(|(stream, log)| (*stream, log.len() as u64)).collect();
        run(&ends, whole, true);
        run(&ends, b, true);
        whole.collect(&placement);
        b.collect(&placement);
        assert!(whole.state.merge.is_empty());
        counts.iter_mut().zip(whole.counts).for_each(|(count, more)| *count += more);
        assert_eq!(b.essence(&placement), whole.essence(&placement));
    }
    println!(
        "{neither} states ahead of each other, {waited} with something waiting; {ran_by_join} ran by joining"
    );
    println!("{counts:?} ran, were void, moved");
    assert!(neither > 100 && ran_by_join > 100 && waited > 100, "{neither} {ran_by_join} {waited}");
    assert!(counts.iter().all(|&count| count > 300), "{counts:?}");
}

/// A server that has forgotten a deletion can tell it from a version that it has not run: what it has
/// run of a key is below [`State::run_below`], and what it has not run is not.
#[test]
fn what_has_run_of_a_key_is_below_everything_that_has_not() {
    let mut rng = Rng::stream(12, "run below", 0);
    let placement = placement();
    let (mut forgotten, mut missing) = (0, 0);
    for _ in 0..300 {
        let logs = Drawing::draw(&mut rng, &placement, true);
        let ends: OrdMap<PartitionId, u64> =
            (logs.iter()).map(|(&stream, log)| (stream, rng.below(log.len() as u64 + 1))).collect();
        let mut held = [(); 3].map(|()| Held::new(&placement));
        for (number, held) in held.iter_mut().enumerate() {
            for (stream, log) in &logs {
                let end = if number == 2 { log.len() as u64 } else { ends[stream] };
                while held.state.applied(*stream).0 < end {
                    held.step(*stream, log, &placement);
                }
            }
        }
        let [forgets, keeps, whole] = &mut held;
        forgets.collect(&placement);
        for (partition, _) in placement.partitions() {
            for (key, versions) in whole.store.scan(partition, None, usize::MAX) {
                let below = forgets.state.run_below(&key, &placement);
                let newest = keeps.store.read(partition, &key).version;
                let known = forgets.store.read(partition, &key).version;
                if known == Version::INITIAL && newest != known {
                    forgotten += 1;
                    assert!(newest.timestamp < below, "{key}: {newest:?} has run, below {below}");
                }
                for (version, _) in versions.iter().filter(|(version, _)| *version > newest) {
                    missing += 1;
                    assert!(version.timestamp >= below, "{key}: {version:?} has not, {below}");
                }
            }
        }
    }
    assert!(forgotten > 50 && missing > 100, "{forgotten} {missing}");
}

/// Servers with one share each, two servers for each share, and their messages.
struct Divided {
    placements: [Placement; 2],
    /// Alternating: of the first share, of the second, of the first, …
    servers: Vec<Held>,
    /// Parts in flight: the receiver, and the share.
    on_way: Vec<(usize, ShareId, Turn, Arc<Part>)>,
    ran: usize,
}

impl Divided {
    fn new() -> Self {
        let placements = shared_placements();
        let servers = (0..4).map(|at| Held::new(&placements[at % 2])).collect();
        Self { placements, servers, on_way: Vec::new(), ran: 0 }
    }

    /// Sends or loses the parts that a server took.
    fn send(&mut self, from: usize, taken: Vec<(Turn, Arc<Part>)>, rng: &mut Rng) {
        let share = self.placements[from % 2].share();
        for (turn, part) in taken {
            for to in (0..4).filter(|to| to % 2 != from % 2) {
                if rng.chance(2, 3) {
                    self.on_way.push((to, share, turn, part.clone()));
                }
            }
        }
    }

    fn run(&mut self, at: usize, rng: &mut Rng) {
        let mut applied = Applied::default();
        let held = &mut self.servers[at];
        held.state.run_due(&mut applied, &self.placements[at % 2], &mut held.store);
        self.ran += applied.ran.len();
        let taken = applied.taken.into_iter().map(|(turn, _, part)| (turn, part)).collect();
        self.send(at, taken, rng);
    }

    fn arrive(&mut self, rng: &mut Rng) {
        let Some(last) = self.on_way.len().checked_sub(1) else { return };
        let at = usize::try_from(rng.range(0, last as u64)).unwrap();
        let (to, share, turn, part) = self.on_way.swap_remove(at);
        self.servers[to].state.arrive(turn, share, part);
        self.run(to, rng);
    }

    /// A server requests everything that it misses from one that has it.
    fn ask(&mut self, at: usize, rng: &mut Rng) {
        let share = self.placements[1 - at % 2].share();
        let turns: Vec<Turn> = self.servers[at].state.shares.due().map(Due::turn).collect();
        for turn in turns {
            let others = (0..4).filter(|other| other % 2 != at % 2);
            let part =
                others.filter_map(|other| self.servers[other].state.shares.part(turn)).next();
            if let Some(part) = part {
                self.servers[at].state.arrive(turn, share, part);
            }
        }
        self.run(at, rng);
    }

    /// A server restarts from the checkpoint that it would write now.
    fn restart(&mut self, at: usize, rng: &mut Rng) {
        let placement = self.placements[at % 2].clone();
        let held = &mut self.servers[at];
        held.collect(&placement);
        let image = held.state.image(&placement);
        let workers = Arc::new(Alone);
        held.state = State::new(&image, &placement, Settings::default(), workers, Time(0));
        self.run(at, rng);
    }

    /// A server takes the state of the other server of its share.
    fn join(&mut self, at: usize, rng: &mut Rng) {
        let placement = self.placements[at % 2].clone();
        let from = &self.servers[(at + 2) % 4];
        let (image, data) = (from.state.image(&placement), from.data(&placement));
        let held = &mut self.servers[at];
        let applied = held.state.join(&image, data, &placement, &mut held.store, Time(1));
        self.ran += applied.ran.len();
        held.state.merge.assert_invariants();
        held.state.shares.assert_invariants();
        let taken = applied.taken.into_iter().map(|(turn, _, part)| (turn, part)).collect();
        self.send(at, taken, rng);
    }

    /// A server merges the next entry of some stream. False if there is none.
    fn step(&mut self, at: usize, logs: &OrdMap<PartitionId, Vec<Command>>, rng: &mut Rng) -> bool {
        let placement = self.placements[at % 2].clone();
        let held = &mut self.servers[at];
        let open = logs
            .iter()
            .filter(|(stream, log)| (held.state.applied(**stream).0 as usize) < log.len());
        let open: Vec<_> = open.collect();
        let Some((stream, log)) = rng.pick(&open).copied() else { return false };
        let taken = held.step(*stream, log, &placement);
        held.state.shares.assert_invariants();
        self.send(at, taken, rng);
        true
    }
}

/// How often servers waited, took another's state, and restarted.
type Counts = [usize; 3];

/// Servers merge these logs while parts get lost, and some restart or take another's state.
fn disturb(
    divided: &mut Divided,
    logs: &OrdMap<PartitionId, Vec<Command>>,
    [waited, joined, restarted]: &mut Counts,
    rng: &mut Rng,
) {
    let mut done = false;
    while !done {
        for _ in 0..40 {
            let at = usize::try_from(rng.below(4)).unwrap();
            *waited += divided.servers[at].state.shares.len();
            match rng.below(24) {
                0 => divided.ask(at, rng),
                1 if rng.chance(1, 3) => {
                    divided.restart(at, rng);
                    *restarted += 1;
                }
                2 if rng.chance(1, 3) => {
                    divided.join(at, rng);
                    *joined += 1;
                }
                3..14 => divided.arrive(rng),
                _ => {
                    divided.step(at, logs, rng);
                }
            }
        }
        done = (0..4).all(|at| !divided.step(at, logs, rng));
    }
    // As many rounds as a chain of waiting transactions may need.
    for _ in 0..400 {
        (0..4).for_each(|at| divided.ask(at, rng));
    }
    let all = divided.servers.iter().map(|held| &held.state.shares);
    all.for_each(|shares| assert!(shares.is_empty(), "{shares:?}"));
}

/// Servers with one share each get the result of a server that holds everything, in whatever order
/// parts arrive or get lost, and whichever servers restart or take another's state meanwhile.
#[test]
fn shares_together_are_what_one_server_holds() {
    let mut rng = Rng::stream(12, "shares", 0);
    let mut counts = Counts::default();
    for _ in 0..200 {
        let mut divided = Divided::new();
        let whole = placement();
        let logs = Drawing::draw(&mut rng, &whole, false);
        disturb(&mut divided, &logs, &mut counts, &mut rng);
        let mut one = Held::new(&whole);
        for (&stream, log) in &logs {
            for _ in log {
                one.step(stream, log, &whole);
            }
        }
        let (image, newest) = one.essence(&whole);
        for (at, held) in divided.servers.iter().enumerate() {
            let placement = &divided.placements[at % 2];
            let (own, data) = held.essence(placement);
            let here = newest.iter().filter(|(key, ..)| placement.holds(key)).cloned();
            assert_eq!(data, here.collect::<Vec<_>>());
            assert_eq!((&own.streams, &own.pending), (&image.streams, &image.pending));
            for (txn, ended) in &own.ended {
                assert_eq!(Some(ended), image.ended.get(txn), "{txn}");
            }
        }
        // Some server of each share that a transaction accesses knows its outcome.
        let known = |txn: &TxnId| divided.servers.iter().any(|s| s.state.ended.get(*txn).is_some());
        assert!(image.ended.keys().all(known));
    }
    println!("{counts:?} waited, joined, restarted");
    let [waited, joined, restarted] = counts;
    assert!(waited > 1_000 && joined > 100 && restarted > 100, "{counts:?}");
}

/// The same while keys move: the result equals that of servers that lose nothing and never restart.
/// A key may move while transactions that its old home has ordered are due.
#[test]
fn shares_are_the_same_whoever_takes_a_state_while_keys_move() {
    let mut rng = Rng::stream(13, "moves", 0);
    let (mut counts, mut moved) = (Counts::default(), 0);
    for _ in 0..200 {
        let (mut divided, mut calm) = (Divided::new(), Divided::new());
        let logs = Drawing::draw(&mut rng, &placement(), true);
        disturb(&mut divided, &logs, &mut counts, &mut rng);
        for (&stream, log) in &logs {
            for _ in log {
                for at in 0..2 {
                    let placement = calm.placements[at].clone();
                    calm.servers[at].step(stream, log, &placement);
                }
            }
        }
        for _ in 0..400 {
            (0..2).for_each(|at| calm.ask(at, &mut rng));
        }
        for (at, held) in divided.servers.iter().enumerate() {
            let (placement, calm) = (&divided.placements[at % 2], &calm.servers[at % 2]);
            assert!(calm.state.shares.is_empty());
            let ((own, data), (image, expected)) =
                (held.essence(placement), calm.essence(placement));
            assert_eq!(data, expected);
            assert_eq!((&own.streams, &own.pending), (&image.streams, &image.pending));
            assert_eq!((&own.moved, &own.ended), (&image.moved, &image.ended));
            moved += calm.counts[2];
        }
    }
    println!("{counts:?} waited, joined, restarted; {moved} moved");
    let [waited, joined, restarted] = counts;
    assert!(waited > 1_000 && joined > 100 && restarted > 100 && moved > 300, "{counts:?} {moved}");
}

#[test]
fn a_state_leaves_in_pieces_that_messages_can_carry() {
    let long = |number: usize| {
        let value = Some(vec![b'x'; number * PIECE_BYTES / 3].into());
        let versions: Versions = [(Version::INITIAL, value)].into_iter().collect();
        (Key::from(format!("k{number}")), versions)
    };
    let all: Vec<(Key, Versions)> = [0, 0, 0, 9, 1, 1, 1, 1, 0].map(long).into();
    let (mut sizes, mut next) = (Vec::new(), Some(0));
    let mut seen = Vec::new();
    while let Some(from) = next {
        let piece = piece_from(&all, from, (3, PIECE_BYTES));
        sizes.push(piece.0.len());
        seen.extend(piece.0);
        next = piece.1;
    }
    assert_eq!(seen, all);
    assert_eq!(sizes, [3, 1, 3, 2], "by the number of keys, or by their length");
    assert_eq!(piece_from(&[], 0, (3, PIECE_BYTES)), (Vec::new(), None));
}

/// A complete image, larger than one message.
fn large_image(rng: &mut Rng) -> Image {
    let whole = placement();
    let logs = Drawing::draw(rng, &whole, true);
    let mut held = Held::new(&whole);
    for (&stream, log) in logs.iter().take(2) {
        for _ in log {
            held.step(stream, log, &whole);
        }
    }
    let mut image = held.state.image(&whole);
    let due = |(stream, place, entry): &(PartitionId, Place, Arc<Sequenced>)| Due {
        entry: entry.clone(),
        stamp: place.stamp,
        places: vec![(*stream, *place)],
    };
    image.due = image.pending.iter().map(due).collect();
    let reads = |ended: &Ended| Part { reads: ended.reads.clone().unwrap(), newest: ended.stamp };
    let kept = image.ended.iter().map(|(&txn, ended)| {
        let name = Name { txn, map: 0 };
        (Turn { name, ..Turn::default() }, Arc::new(reads(ended)))
    });
    image.kept = kept.collect();
    image
}

#[test]
fn an_image_is_the_same_once_all_its_pieces_are_together() {
    let mut rng = Rng::stream(14, "pieces", 0);
    let mut most = 0;
    for _ in 0..50 {
        let image = large_image(&mut rng);
        for bytes_max in [1, 300, 2_000, 1 << 20] {
            let pieces = image.clone().into_pieces(bytes_max);
            most = most.max(pieces.len());
            assert!(
                pieces.iter().all(|piece| piece.size() <= (bytes_max + 100).max(700)),
                "{bytes_max}"
            );
            let (last, others) = pieces.split_last().unwrap();
            assert!(last.is_whole() && others.iter().all(|piece| !piece.is_whole()));
            let mut all = Image::clone(&pieces[0]);
            pieces.iter().skip(1).for_each(|next| all.add(next));
            assert_eq!(Image { piece: 0, pieces: 0, ..all }, image);
        }
    }
    assert!(most > 100, "{most}");
}

#[test]
fn a_large_image_leaves_before_its_data() {
    let image = large_image(&mut Rng::stream(15, "leaving", 0));
    let keys: Vec<(Key, Versions)> =
        (0..7).map(|number| (Key::from(format!("k{number}")), Versions::default())).collect();
    for bytes_max in [300, 1 << 20] {
        let leaving = Leaving::new(image.clone().into_pieces(bytes_max), keys.clone());
        let (first, mut next) = leaving.piece(0, (3, PIECE_BYTES));
        assert!(first.is_first());
        let mut staged = first;
        while let Some(at) = next {
            let (chunk, then) = leaving.piece(at, (3, PIECE_BYTES));
            assert!(staged.goes_on_with(&chunk));
            staged.add(chunk);
            next = then;
        }
        let whole = Image { piece: 0, pieces: 0, ..Image::clone(staged.image.as_ref().unwrap()) };
        assert_eq!((whole, staged.keys), (image.clone(), keys.clone()));
    }
}

/// The reads of a client that has left are forgotten first, then the outcomes of its transactions.
/// An answer never suggests that such a transaction did not run.
#[test]
fn outcomes_of_clients_that_left_are_forgotten_and_nothing_runs_again() {
    let mut rng = Rng::stream(16, "forgotten", 0);
    let (mut forgotten, mut cut) = (0, 0);
    for _ in 0..100 {
        let whole = placement();
        let logs = Drawing::draw(&mut rng, &whole, true);
        let (mut all, mut few) = (Held::new(&whole), Held::new(&whole));
        let outcomes = Bounds { reads_bytes: 100, outcomes: 9 };
        let settings = Settings { outcomes, ..Settings::default() };
        few.state = State::new(&Image::default(), &whole, settings, Arc::new(Alone), Time(0));
        for (&stream, log) in &logs {
            for _ in log {
                all.step(stream, log, &whole);
                few.step(stream, log, &whole);
                few.state.ended.assert_invariants();
            }
        }
        assert_eq!(few.essence(&whole).1, all.essence(&whole).1);
        for (&txn, ended) in all.state.ended.all() {
            assert!(!all.state.has_forgotten(txn));
            match few.state.ended.get(txn) {
                Some(known) => {
                    assert_eq!(known.outcome, ended.outcome);
                    cut += usize::from(known.reads.is_none());
                }
                None => {
                    assert!(few.state.has_forgotten(txn), "{txn}");
                    forgotten += 1;
                }
            }
        }
    }
    assert!(forgotten > 100 && cut > 20, "{forgotten} {cut}");
}

/// Two servers merge the same streams in different orders. Whatever both have run has the same
/// result, unless one loses some of its writes.
#[test]
fn digests_differ_if_one_state_loses_writes_and_only_then() {
    let mut rng = Rng::stream(17, "digests", 0);
    let (mut compared, mut found) = (0, 0);
    for round in 0..60 {
        let whole = placement();
        let logs = Drawing::draw(&mut rng, &whole, true);
        let is_wrong = round % 2 == 1;
        let mut held = [false, is_wrong].map(|loses_writes| {
            let settings = Settings { compared_entries: 4, loses_writes, ..Settings::default() };
            let mut held = Held::new(&whole);
            let image = Image::default();
            held.state = State::new(&image, &whole, settings, Arc::new(Alone), Time(0));
            loop {
                let open = logs.iter().filter(|(stream, log)| {
                    usize::try_from(held.state.applied(**stream).0).unwrap() < log.len()
                });
                let open: Vec<_> = open.collect();
                let Some((stream, log)) = rng.pick(&open).copied() else { break };
                held.step(*stream, log, &whole);
                if rng.chance(1, 3) {
                    let covered = held.state.covered();
                    for (stream, index) in covered {
                        held.state.checks.close(stream, index);
                    }
                }
            }
            held
        });
        let covered = held.each_ref().map(|held| held.state.covered());
        assert_eq!(covered[0], covered[1]);
        for (stream, index) in covered[0].clone() {
            held.iter_mut().for_each(|held| held.state.checks.close(stream, index));
        }
        let [one, other] = &mut held;
        let news = one.state.checks.take_news();
        compared += news.len();
        other.state.checks.hear(NodeId(1), news);
        assert_eq!(other.state.checks.judge(), None, "the first time");
        let difference = other.state.checks.judge();
        assert!(is_wrong || difference.is_none(), "{}", difference.unwrap());
        found += usize::from(difference.is_some());
    }
    assert!(compared > 200 && found > 20, "{compared} {found}");
}
