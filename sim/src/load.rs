//! The clients of a simulation: they submit a workload's transactions to the gateways of their region,
//! retry what aborts, and use another gateway when one dies.

use std::collections::{BTreeMap, BTreeSet};

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, NodeId, RegionId, TxnId};
use orthodrome_core::machine::{Input, Protocol, UNKNOWABLE};
use orthodrome_core::rng::Rng;
use orthodrome_core::session::Session;
use orthodrome_core::time::{Duration, Time, Timestamp, nanos};
use orthodrome_core::txn::{
    AbortReason, Decision, Key, Kind, Outcome, Priority, Reads, Txn, Writes,
};
use orthodrome_eval::history::Entry;
use orthodrome_eval::metrics::{Counters, Latencies, Retry};
use orthodrome_eval::record::{Attempt, entry};
use orthodrome_eval::workload::{Issuer, Request, Step, Values, Workload};

use crate::floor::Floor;
use crate::oracle::Oracle;

/// How clients behave.
#[derive(Clone, PartialEq, Debug)]
pub struct LoadModel {
    /// When they ask.
    pub arrival: Arrival,
    /// When an aborted transaction is tried again.
    pub retry: Retry,
    /// How long a client takes to decide an interactive transaction.
    pub decide: Duration,
    /// Transactions begun in the whole run, at most.
    pub transactions_max: u64,
    /// Probability that a client dies with the gateway that it uses.
    pub die_with_gateway: f64,
    /// Which share of the transactions begins in each region, or of the clients is there, by the region's name; in
    /// proportion, so that they need not add up to one. None begins in regions that are not named. Without any, each
    /// gateway has the same.
    pub origins: BTreeMap<String, f64>,
    /// Clients forget what they were told ([`orthodrome_core::machine::NO_SESSIONS`]). For tests.
    pub no_sessions: bool,
}

/// Which of several places somebody is at, each by its weight.
#[derive(Clone, Debug)]
pub struct Origins {
    weights: Vec<f64>,
    dealt: Vec<f64>,
}

impl Origins {
    /// Places with these weights, which are not below zero.
    #[must_use]
    pub fn new(weights: Vec<f64>) -> Self {
        let dealt = vec![0.0; weights.len()];
        Self { weights, dealt }
    }

    /// A place at random; none if none has any weight.
    pub fn draw(&self, rng: &mut Rng) -> Option<usize> {
        let mut left = rng.unit() * self.weights.iter().sum::<f64>();
        let mut last = None;
        for (place, &weight) in self.weights.iter().enumerate().filter(|(_, weight)| **weight > 0.0)
        {
            last = Some(place);
            left -= weight;
            if left < 0.0 {
                break;
            }
        }
        last
    }

    /// The place of the next of many, so that at all times each has its part of them; with equal weights, in turns.
    pub fn deal(&mut self) -> Option<usize> {
        let places = self.weights.iter().zip(&self.dealt).enumerate();
        let with_weight = places.filter(|(_, (weight, _))| **weight > 0.0);
        let after = with_weight.map(|(place, (weight, dealt))| ((dealt + 1.0) / weight, place));
        let (_, place) = after.min_by(|a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)))?;
        *self.dealt.get_mut(place)? += 1.0;
        Some(place)
    }
}

/// When transactions are begun.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Arrival {
    /// At a rate, whatever the system's answers.
    Open {
        /// Over all clients.
        per_second: f64,
        /// Exponential gaps between arrivals, rather than equal ones.
        poisson: bool,
    },
    /// Each client begins its next transaction when the last has ended.
    Closed {
        /// How many clients there are.
        clients: u32,
        /// How long a client waits in between.
        think: Duration,
    },
}

impl Default for LoadModel {
    fn default() -> Self {
        Self {
            arrival: Arrival::Open { per_second: 100.0, poisson: true },
            retry: Retry::default(),
            decide: Duration::ZERO,
            transactions_max: u64::MAX,
            die_with_gateway: 0.0,
            origins: BTreeMap::new(),
            no_sessions: false,
        }
    }
}

/// How long a client waits before it asks again after an answer that tells it to come back later.
const BACK_OFF: Duration = Duration::from_millis(20);

/// Name of the reads that the run itself adds at the end, which no workload knows.
const FINAL_READ: &str = "final-read";

/// Name of the reads by which a general transaction finds its keys, where the protocol runs none.
const LOOK: &str = "look";

/// What a client does next.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Action {
    Begin,
    Read,
    Decide,
    Resolve,
}

/// A general transaction of a protocol that runs none, by reconnaissance, as the client library does it:
/// read-only transactions find the keys; then an interactive one declares all of them, and commits only
/// if it reads what they read. Each has a name of its own.
#[derive(Debug)]
struct Ahead {
    /// What the workload asked for.
    request: Request,
    /// What was read so far.
    seen: Reads,
    /// What follows from it, once that is known.
    decision: Option<Decision>,
    /// What was read turned out to be old.
    is_stale: bool,
    /// How often all of it was tried before.
    tries: u32,
    /// WAN hops of the reads.
    hops: u16,
}

impl Ahead {
    fn new(request: Request) -> Self {
        let (seen, decision) = (Reads::new(), None);
        Self { request, seen, decision, is_stale: false, tries: 0, hops: 0 }
    }

    /// The next transaction: another look, or the one that commits.
    fn next(&mut self, workload: &dyn Workload) -> Request {
        let is_begun = !self.seen.is_empty() || self.request.reads.is_empty();
        let step = if is_begun {
            workload.step(&self.request, &self.seen)
        } else {
            Step::Read(self.request.reads.clone())
        };
        let Request { name, priority, parameter, .. } = self.request;
        match step {
            Step::Read(reads) => {
                let (kind, writes) = (Kind::ReadOnly, Vec::new());
                Request { name: LOOK, kind, reads, writes, priority, parameter }
            }
            Step::Decide(decision) => {
                let none = Writes::new();
                let writes = match &decision {
                    Decision::Commit(writes) => writes,
                    Decision::Abort => &none,
                };
                let (reads, writes) = (self.seen.keys().cloned().collect(), writes.keys().cloned());
                let (kind, writes) = (Kind::Interactive, writes.collect());
                self.decision = Some(decision);
                Request { name, kind, reads, writes, priority, parameter }
            }
        }
    }

    /// What the transaction that commits decides after it has read.
    fn decide(&mut self, reads: &Reads) -> Decision {
        let is_as_seen = self
            .seen
            .iter()
            .all(|(key, seen)| reads.get(key).is_some_and(|read| read.version == seen.version));
        self.is_stale = !is_as_seen;
        let decision = self.decision.clone().filter(|_| is_as_seen);
        decision.unwrap_or(Decision::Abort)
    }

    /// From the beginning.
    fn again(&mut self) {
        self.seen.clear();
        (self.decision, self.is_stale) = (None, false);
        self.tries = self.tries.saturating_add(1);
    }
}

/// One transaction under way.
#[derive(Debug)]
struct Active {
    /// The general transaction that this one is a part of.
    ahead: Option<Box<Ahead>>,
    request: Request,
    txn: TxnId,
    began: Time,
    attempt_began: Time,
    gateway: u32,
    /// What it read, in all rounds.
    reads: Option<Reads>,
    /// What it asked for in the round that is under way.
    round: Vec<Key>,
    decision: Option<Decision>,
    hops: u16,
    floor: Duration,
    next: Action,
    is_final: bool,
    /// The client had to ask what became of this attempt: what it read may be gone.
    is_resolved: bool,
    /// It read less than its client knew, and was given up (R11).
    is_behind: bool,
}

impl Active {
    /// Begins again under this name.
    fn start_over(&mut self, txn: TxnId) {
        self.txn = txn;
        self.reads = None;
        self.round.clear();
        self.decision = None;
        self.hops = 0;
        self.is_resolved = false;
        self.is_behind = false;
    }

    /// A procedure that was resolved for a client who never got its reads: they are not known, and
    /// nothing can be said of them.
    fn has_lost_reads(&self) -> bool {
        self.is_resolved && self.reads.is_none() && matches!(self.request.kind, Kind::Procedure(_))
    }
}

#[derive(Debug)]
struct Client {
    id: ClientId,
    region: RegionId,
    gateway: u32,
    counter: u64,
    /// Counts what the client did, so that an outdated wake-up is known as such.
    serial: u32,
    active: Option<Box<Active>>,
    /// What it was told.
    session: Session,
}

/// A wake-up that a client wants.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Due {
    /// When.
    pub at: Time,
    /// Which client.
    pub client: u32,
    /// Its serial number then.
    pub serial: u32,
}

/// Where a history goes.
pub type HistorySink = Box<dyn FnMut(Entry)>;

/// All clients.
pub struct Load {
    model: LoadModel,
    workload: Box<dyn Workload>,
    /// The protocol runs general transactions.
    runs_general: bool,
    rng: Rng,
    floor: Floor,
    clients: Vec<Client>,
    /// The client slot that each client id (less one) belongs to.
    slot_of: Vec<u32>,
    /// Idle clients of each gateway, for open loops.
    idle: BTreeMap<u32, Vec<u32>>,
    /// Dense number, id and region of every gateway.
    gateways: Vec<(u32, NodeId, RegionId)>,
    /// Their parts of the load; none if all have the same.
    origins: Option<Origins>,
    regions: Vec<String>,
    region_distance: Vec<Vec<Duration>>,
    begun: u64,
    outstanding: u32,
    stopped: bool,
    /// What clients want to be woken for; the simulation takes it.
    pub due: Vec<Due>,
    /// Which part of the run is measured.
    pub measured: std::ops::Range<Time>,
    /// Latencies of the measured part.
    pub latencies: Latencies,
    /// Counts of the measured part.
    pub counters: Counters,
    /// What the workload's last transactions read.
    final_state: Reads,
    /// Where the history goes, if one is kept.
    pub history: Option<HistorySink>,
    /// The white-box judge, if there is one.
    pub oracle: Option<Oracle>,
    /// The first promise that was broken.
    pub failure: Option<String>,
}

impl std::fmt::Debug for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Load").field("model", &self.model).finish_non_exhaustive()
    }
}

impl Load {
    /// Clients of the gateways `gateways` (dense number and id) of a protocol that runs general
    /// transactions or does not.
    #[must_use]
    pub fn new(
        model: LoadModel,
        mut workload: Box<dyn Workload>,
        runs_general: bool,
        cluster: &Cluster,
        gateways: &[(u32, NodeId)],
        rng: Rng,
    ) -> Self {
        workload.place(cluster);
        let topology = &cluster.topology;
        let distance = |a: RegionId| topology.regions().map(move |b| topology.rtt(a, b)).collect();
        let gateways: Vec<(u32, NodeId, RegionId)> =
            gateways.iter().map(|&(dense, id)| (dense, id, cluster.region_of(id))).collect();
        let weight = |&(_, _, region): &(u32, NodeId, RegionId)| {
            let others = gateways.iter().filter(|(.., other)| *other == region).count();
            let share = model.origins.get(topology.name_of(region)).copied().unwrap_or(0.0);
            share / others.max(1) as f64
        };
        let weights = || Origins::new(gateways.iter().map(weight).collect());
        let origins = (!model.origins.is_empty()).then(weights);
        Self {
            origins,
            model,
            workload,
            runs_general,
            rng,
            floor: Floor::new(cluster),
            clients: Vec::new(),
            slot_of: Vec::new(),
            idle: BTreeMap::new(),
            regions: topology.regions().map(|r| topology.name_of(r).to_owned()).collect(),
            region_distance: topology.regions().map(distance).collect(),
            gateways,
            begun: 0,
            outstanding: 0,
            stopped: false,
            due: Vec::new(),
            measured: Time::ZERO..Time::MAX,
            latencies: Latencies::default(),
            counters: Counters::default(),
            final_state: Reads::new(),
            history: None,
            oracle: None,
            failure: None,
        }
    }

    /// The workload's name.
    #[must_use]
    pub fn workload_name(&self) -> String {
        self.workload.name()
    }

    /// How the workload's values appear in histories.
    #[must_use]
    pub fn values(&self) -> Values {
        self.workload.values()
    }

    /// The workload's own audit of the whole database, if it has one.
    #[must_use]
    pub fn final_requests(&self) -> Vec<Request> {
        self.workload.final_requests()
    }

    /// What the workload says to everything that its final requests read.
    ///
    /// # Errors
    /// What does not hold.
    pub fn audit_end(&self) -> Result<(), String> {
        self.workload.audit_end(&self.final_state)
    }

    /// Read-only transactions over every key that a committed transaction touched, if there is an
    /// oracle to judge what they find.
    #[must_use]
    pub fn final_reads(&self) -> Vec<Request> {
        let keys: Vec<Key> = self.oracle.iter().flat_map(Oracle::keys).cloned().collect();
        let request = |reads: &[Key]| Request {
            name: FINAL_READ,
            kind: Kind::ReadOnly,
            reads: reads.to_vec(),
            writes: Vec::new(),
            priority: Priority::LOW,
            parameter: 0,
        };
        keys.chunks(32).map(request).collect()
    }

    /// Transactions begun and not ended.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// Transactions begun so far.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// The transactions under way, oldest client first, each with the gateway that has it.
    pub fn under_way(&self) -> impl Iterator<Item = (TxnId, u32)> + '_ {
        self.clients.iter().filter_map(|c| c.active.as_ref().map(|a| (a.txn, a.gateway)))
    }

    /// Starts closed-loop clients, or returns when the first open-loop arrival is due.
    pub fn start(&mut self, now: Time) -> Option<Time> {
        match self.model.arrival {
            Arrival::Open { .. } => Some(now + self.gap()),
            Arrival::Closed { clients, .. } => {
                for number in 0..clients as usize {
                    let count = self.gateways.len().max(1);
                    let place = match &mut self.origins {
                        Some(origins) => origins.deal(),
                        None => Some(number % count),
                    };
                    let Some(&(gateway, _, region)) =
                        place.and_then(|place| self.gateways.get(place))
                    else {
                        break;
                    };
                    let client = self.add_client(gateway, region);
                    self.next_transaction(client, now);
                }
                None
            }
        }
    }

    /// No new transactions from now on; those under way go on.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// An open-loop arrival: some client begins a transaction. Returns when the next is due.
    pub fn arrive(&mut self, now: Time) -> Option<Time> {
        if self.stopped || self.begun >= self.model.transactions_max {
            return None;
        }
        let place = match &self.origins {
            Some(origins) => origins.draw(&mut self.rng).and_then(|at| self.gateways.get(at)),
            None => self.rng.pick(&self.gateways),
        };
        if let Some(&(gateway, _, region)) = place {
            let idle = self.idle.get_mut(&gateway).and_then(Vec::pop);
            let client = idle.unwrap_or_else(|| self.add_client(gateway, region));
            self.next_transaction(client, now);
        }
        Some(now + self.gap())
    }

    fn gap(&mut self) -> Duration {
        match self.model.arrival {
            Arrival::Open { per_second, poisson } => {
                let mean = 1e9 / per_second.max(1e-9);
                let gap = if poisson { -(1.0 - self.rng.unit()).ln() * mean } else { mean };
                Duration::from_nanos(gap as u64)
            }
            Arrival::Closed { think, .. } => think,
        }
    }

    fn add_client(&mut self, gateway: u32, region: RegionId) -> u32 {
        let slot = u32::try_from(self.clients.len()).unwrap_or(u32::MAX);
        let id = self.incarnate(slot);
        let (active, session) = (None, Session::default());
        self.clients.push(Client { id, region, gateway, counter: 0, serial: 0, active, session });
        slot
    }

    /// A new client id: the first, or one after the last incarnation gave up not knowing.
    fn incarnate(&mut self, slot: u32) -> ClientId {
        self.slot_of.push(slot);
        ClientId(self.slot_of.len() as u64)
    }

    fn client(&mut self, slot: u32) -> &mut Client {
        let client = self.clients.get_mut(slot as usize);
        client.unwrap_or_else(|| unreachable!("client slots are never removed"))
    }

    fn next_transaction(&mut self, slot: u32, now: Time) {
        if self.stopped || self.begun >= self.model.transactions_max {
            return;
        }
        let client = self.client(slot);
        let issuer = Issuer { client: client.id, index: slot, region: client.region };
        let request = self.workload.next(issuer, &mut self.rng);
        self.issue(slot, request, now, false);
    }

    /// Lets one more client begin `request` now, from the first gateway's region, even if the load
    /// was stopped. Its failure to commit fails the run.
    pub fn issue_final(&mut self, request: Request, now: Time) {
        let Some(&(gateway, _, region)) = self.gateways.first() else { return };
        let slot = self.add_client(gateway, region);
        self.issue(slot, request, now, true);
    }

    fn issue(&mut self, slot: u32, request: Request, now: Time, is_final: bool) {
        let region = self.client(slot).region;
        let floor = self.floor.of(region, &request);
        self.begun += 1;
        self.outstanding += 1;
        if self.measured.contains(&now) && !is_final {
            self.counters.offered += 1;
        }
        let (mut request, mut ahead) = (request, None);
        if request.kind == Kind::General && !self.runs_general {
            let mut parts = Ahead::new(request);
            request = parts.next(&*self.workload);
            ahead = Some(Box::new(parts));
        }
        let client = self.client(slot);
        client.counter += 1;
        client.active = Some(Box::new(Active {
            ahead,
            txn: TxnId::new(client.id, client.counter),
            request,
            began: now,
            attempt_began: now,
            gateway: client.gateway,
            reads: None,
            round: Vec::new(),
            decision: None,
            hops: 0,
            floor,
            next: Action::Begin,
            is_final,
            is_resolved: false,
            is_behind: false,
        }));
        self.schedule(slot, now, Action::Begin);
    }

    fn schedule(&mut self, slot: u32, at: Time, next: Action) {
        let client = self.client(slot);
        client.serial += 1;
        let serial = client.serial;
        if let Some(active) = &mut client.active {
            active.next = next;
        }
        self.due.push(Due { at, client: slot, serial });
    }

    /// A client's wake-up: which gateway gets which input, and how many WAN hops led to it.
    /// Nothing, if the client has moved on or no gateway is up.
    pub fn wake<P: Protocol>(
        &mut self,
        now: Time,
        (slot, serial): (u32, u32),
        is_up: impl Fn(u32) -> bool,
    ) -> Option<(u32, Input<P>, u16)> {
        let client = self.clients.get(slot as usize)?;
        if client.serial != serial {
            return None;
        }
        let active = client.active.as_ref()?;
        if active.next == Action::Read {
            let input = Input::Read { txn: active.txn, keys: active.round.clone() };
            return Some((active.gateway, input, active.hops));
        }
        if active.next == Action::Decide {
            let decision = active.decision.clone()?;
            let input = Input::Decide { txn: active.txn, decision };
            return Some((active.gateway, input, active.hops));
        }
        let Some(gateway) = self.nearest_gateway(slot, is_up) else {
            // Every gateway is down; ask again later.
            let next = active.next;
            self.schedule(slot, now + BACK_OFF * 5, next);
            return None;
        };
        let no_sessions = self.model.no_sessions;
        let client = self.client(slot);
        let home = client.region;
        // The client knows the outcome of everything before: it gives its id up when it does not.
        let below = client.counter;
        let Client { active, session, .. } = client;
        let active = active.as_mut()?;
        active.gateway = gateway;
        let mut txn = active.request.to_txn(active.txn, home, below);
        if !no_sessions && shows_reads(&txn.kind) {
            txn.floors = session.floors_of(txn.reads.iter().chain(&txn.writes));
        }
        let input = match active.next {
            Action::Begin => {
                active.attempt_began = now;
                active.round.clone_from(&txn.reads);
                Input::Begin(txn)
            }
            Action::Resolve | Action::Read | Action::Decide => {
                active.is_resolved = true;
                Input::Resolve {
                    txn,
                    reads: active.reads.clone().unwrap_or_default(),
                    decision: active.decision.clone(),
                }
            }
        };
        Some((gateway, input, 0))
    }

    /// The client's own gateway if it is up, else the nearest that is.
    fn nearest_gateway(&self, slot: u32, is_up: impl Fn(u32) -> bool) -> Option<u32> {
        let client = self.clients.get(slot as usize)?;
        if is_up(client.gateway) {
            return Some(client.gateway);
        }
        let row = self.region_distance.get(usize::from(client.region.0))?;
        let up = self.gateways.iter().filter(|(dense, ..)| is_up(*dense));
        let nearest = up.min_by_key(|(dense, _, region)| {
            (row.get(usize::from(region.0)).copied().unwrap_or_default(), *dense)
        });
        nearest.map(|&(dense, ..)| dense)
    }

    /// The client that has `txn` under way at `gateway`; none if it has moved on.
    fn holder(&self, txn: TxnId, gateway: u32) -> Option<u32> {
        let index = usize::try_from(txn.client.0).ok()?.checked_sub(1)?;
        let slot = *self.slot_of.get(index)?;
        let active = self.clients.get(slot as usize)?.active.as_ref()?;
        (active.txn == txn && active.gateway == gateway).then_some(slot)
    }

    /// True if a client waits for this attempt and it only reads. That has no effect, so who is asked
    /// what became of it may read again in its name, at another time.
    pub fn only_reads(&self, txn: TxnId) -> bool {
        let index = usize::try_from(txn.client.0).ok().and_then(|client| client.checked_sub(1));
        let slot = index.and_then(|index| self.slot_of.get(index));
        let active = slot.and_then(|&slot| self.clients.get(slot as usize)?.active.as_ref());
        let active = active.filter(|active| active.txn == txn);
        active.is_some_and(|active| match active.request.kind {
            Kind::Interactive | Kind::General => false,
            Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => {
                active.request.writes.is_empty()
            }
        })
    }

    /// A gateway answered with reads.
    pub fn on_reads(&mut self, now: Time, gateway: u32, txn: TxnId, reads: Reads, hops: u16) {
        let Some(slot) = self.holder(txn, gateway) else { return };
        let Self { clients, workload, .. } = self;
        let Some(client) = clients.get_mut(slot as usize) else { return };
        let Some(active) = client.active.as_mut() else { return };
        if active.reads.is_some() && active.decision.is_some() {
            // A resolved attempt reports its reads again; the decision stands.
            return;
        }
        let missing = active.round.iter().find(|key| !reads.contains_key(*key));
        if let Some(key) = missing {
            let problem = format!("{txn} received its reads without {key}, which it requested");
            self.failure.get_or_insert(problem);
            return;
        }
        active.hops = hops;
        let is_open = matches!(active.request.kind, Kind::Interactive | Kind::General);
        if is_open && !self.model.no_sessions && client.session.is_ahead_of(&reads) {
            // Nobody is shown this: the gateway, or the client's library, gives the attempt up.
            active.is_behind = true;
            active.decision = Some(Decision::Abort);
            self.schedule(slot, now, Action::Decide);
            return;
        }
        let mut all = active.reads.take().unwrap_or_default();
        all.extend(reads);
        let next = match active.request.kind {
            Kind::Procedure(_) | Kind::ReadOnly | Kind::StaleReadOnly => None,
            Kind::Interactive => {
                active.decision = Some(match &mut active.ahead {
                    Some(ahead) => ahead.decide(&all),
                    None => workload.decide(&active.request, &all),
                });
                Some(Action::Decide)
            }
            Kind::General => Some(match workload.step(&active.request, &all) {
                Step::Read(keys) => {
                    active.round = keys;
                    Action::Read
                }
                Step::Decide(decision) => {
                    active.decision = Some(decision);
                    Action::Decide
                }
            }),
        };
        active.reads = Some(all);
        if let Some(next) = next {
            let at = now + self.model.decide;
            self.schedule(slot, at, next);
        }
    }

    /// A gateway answered with an outcome.
    pub fn on_finish(
        &mut self,
        now: Time,
        gateway: u32,
        (txn, outcome, path): (TxnId, Outcome, &'static str),
        hops: u16,
    ) {
        let told = self.oracle.as_mut().map_or(Ok(()), |oracle| oracle.told(txn, outcome));
        self.note_failure(told);
        let Some(slot) = self.holder(txn, gateway) else { return };
        if self.measured.contains(&now) && outcome != Outcome::Unknown {
            match self.counters.path.get_mut(path) {
                Some(count) => *count += 1,
                None => drop(self.counters.path.insert(path.into(), 1)),
            }
        }
        match outcome {
            Outcome::Committed(at) => {
                self.check_commit(slot, at);
                self.remember(slot, at);
                self.write_history(slot, Some((now, outcome)), false);
                if !self.look_further(slot, now, hops) {
                    self.count_commit(slot, now, hops);
                    self.end(slot, now, false);
                }
            }
            Outcome::Aborted(reason) => self.on_aborted(slot, now, reason),
            Outcome::Unknown if path == UNKNOWABLE => self.on_unknowable(slot, now),
            Outcome::Unknown => self.schedule(slot, now + BACK_OFF, Action::Resolve),
        }
    }

    /// The client knows from now on what its transaction read and wrote (R11).
    fn remember(&mut self, slot: u32, at: Timestamp) {
        let Client { active, session, .. } = self.client(slot);
        let Some(active) = active else { return };
        let nothing = Reads::new();
        let reads = active.reads.as_ref().unwrap_or(&nothing);
        session.read(reads);
        match (&active.request.kind, &active.decision) {
            (Kind::Interactive | Kind::General, Some(Decision::Commit(writes))) => {
                session.wrote(at, writes);
            }
            (Kind::Procedure(ops), _) => session.ran(at, ops),
            (Kind::Interactive | Kind::General, Some(Decision::Abort) | None)
            | (Kind::ReadOnly | Kind::StaleReadOnly, _) => {}
        }
    }

    /// A part of a general transaction committed: the next part follows, unless it was the last.
    fn look_further(&mut self, slot: u32, now: Time, hops: u16) -> bool {
        let Self { clients, workload, .. } = self;
        let Some(client) = clients.get_mut(slot as usize) else { return false };
        let Some(active) = &mut client.active else { return false };
        let Some(ahead) = active.ahead.as_mut().filter(|ahead| ahead.decision.is_none()) else {
            return false;
        };
        ahead.hops = ahead.hops.saturating_add(hops);
        ahead.seen.extend(active.reads.take().unwrap_or_default());
        active.request = ahead.next(&**workload);
        self.rename(slot);
        self.schedule(slot, now, Action::Begin);
        true
    }

    /// The client begins its next part under a new name.
    fn rename(&mut self, slot: u32) {
        let client = self.client(slot);
        client.counter += 1;
        let txn = TxnId::new(client.id, client.counter);
        if let Some(active) = &mut client.active {
            active.start_over(txn);
        }
    }

    fn on_aborted(&mut self, slot: u32, now: Time, reason: AbortReason) {
        let retry = self.model.retry;
        let measured = self.measured.contains(&now);
        let Some(active) = self.client(slot).active.as_ref() else { return };
        let (txn, priority, is_final) = (active.txn, active.request.priority, active.is_final);
        let is_stale = active.ahead.as_ref().is_some_and(|ahead| ahead.is_stale);
        // It gave up because of what it had read before.
        let reason = if is_stale || active.is_behind { AbortReason::StaleRead } else { reason };
        let tries = active.ahead.as_ref().map_or(txn.attempt, |ahead| ahead.tries);
        // Clients may be told before participants are, so an audit may have to come back; that it
        // ends at all is what the drain's limit sees to.
        let next = if is_final {
            Some(txn.retry())
        } else {
            retry.after(TxnId { attempt: tries, ..txn }, priority, reason)
        };
        self.write_history(slot, Some((now, Outcome::Aborted(reason))), next.is_some());
        if measured && !is_final {
            *self.counters.aborted.entry(reason).or_default() += 1;
        }
        if reason == AbortReason::Invalid {
            self.failure.get_or_insert(format!("{txn} was rejected as invalid"));
        }
        let Some(next) = next else {
            if measured {
                self.counters.failed += 1;
            }
            self.end(slot, now, false);
            return;
        };
        let Self { clients, workload, .. } = self;
        let Some(active) = clients.get_mut(slot as usize).and_then(|c| c.active.as_mut()) else {
            return;
        };
        if let Some(ahead) = &mut active.ahead {
            ahead.again();
            active.request = ahead.next(&**workload);
            self.rename(slot);
        } else {
            active.start_over(next);
        }
        let wait = match (is_final, reason == AbortReason::Overload) {
            (true, _) => BACK_OFF * 5,
            (false, true) => BACK_OFF,
            (false, false) => Duration::ZERO,
        };
        self.schedule(slot, now + wait, Action::Begin);
    }

    /// Nobody can tell, now or later. The client has to live with it.
    fn on_unknowable(&mut self, slot: u32, now: Time) {
        if self.client(slot).active.as_ref().is_some_and(|active| active.is_final) {
            // It only reads, so it may as well do so again.
            self.on_aborted(slot, now, AbortReason::Recovery);
            return;
        }
        self.write_history(slot, None, false);
        if self.measured.contains(&now) {
            self.counters.failed += 1;
        }
        self.end(slot, now, true);
    }

    fn count_commit(&mut self, slot: u32, now: Time, hops: u16) {
        let Self { clients, counters, latencies, measured, .. } = self;
        let Some(client) = clients.get(slot as usize) else { return };
        let Some(active) = &client.active else { return };
        if active.is_final || !measured.contains(&now) {
            return;
        }
        let latency = now.since(active.began);
        counters.committed += 1;
        latencies.record(active.request.priority, client.region, latency);
        latencies.record_kind(active.request.name, latency);
        let reach = self.floor.reach(client.region, &active.request);
        latencies.record_kind(reach.name(), latency);
        let hops = active.ahead.as_ref().map_or(hops, |ahead| ahead.hops.saturating_add(hops));
        let floor = nanos(active.floor).max(1);
        counters.floor_ratio_millis.record(nanos(latency).saturating_mul(1_000) / floor);
        counters.wan_round_trip_millis.record(u64::from(hops) * 500);
    }

    /// The gateway died with what it had under way: its clients ask elsewhere, or die too.
    pub fn on_gateway_crash(&mut self, now: Time, gateway: u32) {
        for slot in 0..u32::try_from(self.clients.len()).unwrap_or(u32::MAX) {
            let client = self.clients.get(slot as usize);
            let Some(active) = client.and_then(|client| client.active.as_ref()) else { continue };
            // One that is still to begin goes to another gateway by itself.
            if active.gateway != gateway {
                continue;
            }
            if self.rng.unit() < self.model.die_with_gateway && !active.is_final {
                self.write_history(slot, None, false);
                if self.measured.contains(&now) {
                    self.counters.failed += 1;
                }
                self.end(slot, now, true);
            } else if active.next != Action::Begin || active.attempt_began < now {
                self.schedule(slot, now + BACK_OFF, Action::Resolve);
            }
        }
    }

    /// Whatever is still under way when the run ends has an unknown outcome.
    pub fn abandon(&mut self) {
        for slot in 0..u32::try_from(self.clients.len()).unwrap_or(u32::MAX) {
            if self.client(slot).active.is_some() {
                self.write_history(slot, None, false);
                self.client(slot).active = None;
                self.outstanding -= 1;
            }
        }
    }

    /// The client's transaction is over; in a closed loop its next one follows. A client that does
    /// not know what became of it goes on under another id, for its old one promises that it knows
    /// the outcome of everything it began.
    fn end(&mut self, slot: u32, now: Time, is_unknown: bool) {
        if is_unknown {
            let id = self.incarnate(slot);
            let client = self.client(slot);
            (client.id, client.counter) = (id, 0);
        }
        let client = self.client(slot);
        client.serial += 1;
        let gateway = client.gateway;
        let Some(active) = client.active.take() else { return };
        self.outstanding -= 1;
        if active.is_final {
            return;
        }
        match self.model.arrival {
            Arrival::Open { .. } => self.idle.entry(gateway).or_default().push(slot),
            Arrival::Closed { think, .. } => self.next_transaction(slot, now + think),
        }
    }

    fn note_failure(&mut self, result: Result<(), String>) {
        if let Err(problem) = result {
            self.failure.get_or_insert(problem);
        }
    }

    fn check_commit(&mut self, slot: u32, at: Timestamp) {
        let Some(active) = self.clients.get(slot as usize).and_then(|c| c.active.as_ref()) else {
            return;
        };
        let nothing = Reads::new();
        let result = match &active.reads {
            None if !active.request.reads.is_empty() && !active.has_lost_reads() => {
                Err(format!("{} committed, but its client received no reads", active.txn))
            }
            reads => {
                let reads = reads.as_ref().unwrap_or(&nothing);
                let is_own = [FINAL_READ, LOOK].contains(&active.request.name);
                if active.is_final && !is_own {
                    self.final_state.extend(reads.clone());
                }
                let audit = if is_own || active.has_lost_reads() {
                    Ok(())
                } else {
                    self.workload.audit(&active.request, reads)
                };
                let audit = audit.map_err(|problem| format!("{}: {problem}", active.txn));
                match &mut self.oracle {
                    None => audit,
                    Some(oracle) if active.is_final => audit.and(oracle.judge_final(reads)),
                    Some(oracle) => {
                        let written = written(active, reads);
                        let element = active.request.parameter;
                        audit.and(oracle.committed(active.txn, at, reads, &written, element))
                    }
                }
            }
        };
        self.note_failure(result);
    }

    fn write_history(&mut self, slot: u32, completed: Option<(Time, Outcome)>, is_retried: bool) {
        let Some(sink) = &mut self.history else { return };
        let Some(client) = self.clients.get(slot as usize) else { return };
        let Some(active) = &client.active else { return };
        let mut request = std::borrow::Cow::Borrowed(&active.request);
        if active.has_lost_reads() {
            request.to_mut().reads.clear();
        }
        let region = self.regions.get(usize::from(client.region.0));
        let attempt = Attempt {
            request: &request,
            txn: active.txn,
            region: region.map_or("?", String::as_str),
            invoked: active.attempt_began,
            completed,
            reads: active.reads.as_ref(),
            decision: active.decision.as_ref(),
            is_retried,
        };
        match entry(&attempt, self.workload.values()) {
            Ok(entry) => sink(entry),
            Err(problem) => drop(self.failure.get_or_insert(problem.to_string())),
        }
    }
}

/// True if what it reads is shown before it is known to commit, or may be old: a client's session
/// has a say in that. Other kinds are held to the order of all transactions.
fn shows_reads(kind: &Kind) -> bool {
    match kind {
        Kind::Interactive | Kind::General | Kind::StaleReadOnly => true,
        Kind::Procedure(_) | Kind::ReadOnly => false,
    }
}

/// The keys that a transaction wrote if it committed with those reads.
fn written(active: &Active, reads: &Reads) -> BTreeSet<Key> {
    match (&active.request.kind, &active.decision) {
        (Kind::ReadOnly | Kind::StaleReadOnly, _) => BTreeSet::new(),
        (Kind::Interactive | Kind::General, None | Some(Decision::Abort)) => BTreeSet::new(),
        (Kind::Interactive | Kind::General, Some(Decision::Commit(writes))) => {
            writes.keys().cloned().collect()
        }
        // Its guards held, and it writes every key that it declared.
        (Kind::Procedure(_), _) if active.has_lost_reads() => {
            active.request.writes.iter().cloned().collect()
        }
        (Kind::Procedure(ops), _) => match Txn::execute(ops, reads) {
            Ok(writes) => writes.into_keys().collect(),
            Err(_) => BTreeSet::new(),
        },
    }
}
