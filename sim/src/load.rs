//! The clients of a simulation: they submit a workload's transactions to the gateways of their
//! region, retry what aborts, and use another gateway when one dies.

mod active;
mod answers;
mod keys;
mod model;
pub mod ranging;
mod record;
mod scanning;
mod watching;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{ClientId, NodeId, RegionId, TxnId};
use orthodrome_core::machine::{Input, Protocol};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;
use orthodrome_core::session::Session;
use orthodrome_core::time::{Duration, Time};
use orthodrome_core::txn::{Key, Kind, Priority, Read, Reads};
use orthodrome_eval::history::Entry;
use orthodrome_eval::metrics::{Counters, Latencies};
use orthodrome_eval::workload::{Issuer, Request, Values, Workload};

use self::active::{Action, Active, Ahead, Client};
use self::keys::Keys;
pub use self::model::{Arrival, LoadModel, Origins};
use self::ranging::Committed;
use self::record::shows_reads;
use self::scanning::Scanning;
pub use self::scanning::{Asked, ScanId};
use crate::floor::Floor;
use crate::oracle::Oracle;

/// How long a client waits before it retries after an answer that asks it to come back later.
const BACK_OFF: Duration = Duration::from_millis(20);

/// Name of the final reads that the run itself adds, which no workload knows.
const FINAL_READ: &str = "final-read";

/// A wake-up for a client.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Due {
    /// The time.
    pub at: Time,
    /// The client.
    pub client: u32,
    /// The client's serial number at that time.
    pub serial: u32,
}

/// What a protocol can do for its clients.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Abilities {
    /// It runs general transactions ([`Protocol::GENERAL`]).
    pub general: bool,
    /// Its servers list names ([`Protocol::SCANS`]).
    pub scans: bool,
    /// Copies of the data are divided into shares ([`Protocol::SHARES`]).
    pub shares: bool,
}

impl Abilities {
    /// The abilities of a protocol.
    #[must_use]
    pub fn of<P: Protocol>() -> Self {
        Self { general: P::GENERAL, scans: P::SCANS, shares: P::SHARES }
    }
}

/// The receiver of a history.
pub type HistorySink = Box<dyn FnMut(Entry)>;

/// All clients.
pub struct Load {
    model: LoadModel,
    workload: Box<dyn Workload>,
    keys: Keys,
    /// What the protocol can do.
    abilities: Abilities,
    /// The keys that transactions of this run may have written, for workloads that scan.
    written: OrdSet<Key>,
    /// Acknowledged changes, and whether they deleted the key, for workloads that scan.
    committed: Committed,
    /// The number of scans that began so far.
    scans: u64,
    rng: Rng,
    floor: Floor,
    clients: Vec<Client>,
    /// The slot of each client id (minus one).
    slot_of: Vec<u32>,
    /// Idle clients of each gateway, for open loops.
    idle: OrdMap<u32, Vec<u32>>,
    /// Dense number, id and region of every gateway.
    gateways: Vec<(u32, NodeId, RegionId)>,
    /// The regions' shares of the load; none if all gateways have the same share.
    origins: Option<Origins>,
    regions: Vec<String>,
    region_distance: Vec<Vec<Duration>>,
    begun: u64,
    outstanding: u32,
    stopped: bool,
    /// Wake-ups for clients; the simulation takes them.
    pub due: Vec<Due>,
    /// Requests for names; the simulation takes them.
    pub asks: Vec<Asked>,
    /// The measured part of the run.
    pub measured: std::ops::Range<Time>,
    /// Latencies of the measured part.
    pub latencies: Latencies,
    /// Counts of the measured part.
    pub counters: Counters,
    /// The values that the workload's final requests read.
    final_state: Reads,
    /// The receiver of the history, if one is kept.
    pub history: Option<HistorySink>,
    /// The white-box checker, if there is one.
    pub oracle: Option<Oracle>,
    /// The first broken promise.
    pub failure: Option<String>,
}

impl std::fmt::Debug for Load {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Load").field("model", &self.model).finish_non_exhaustive()
    }
}

impl Load {
    /// Clients of the gateways `gateways` (dense number and id), of a protocol with these
    /// abilities.
    #[must_use]
    pub fn new(
        model: LoadModel,
        mut workload: Box<dyn Workload>,
        abilities: Abilities,
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
            keys: Keys::default(),
            abilities,
            written: OrdSet::new(),
            committed: OrdMap::new(),
            scans: 0,
            rng,
            floor: Floor::new(cluster),
            clients: Vec::new(),
            slot_of: Vec::new(),
            idle: OrdMap::new(),
            regions: topology.regions().map(|r| topology.name_of(r).to_owned()).collect(),
            region_distance: topology.regions().map(distance).collect(),
            gateways,
            begun: 0,
            outstanding: 0,
            stopped: false,
            due: Vec::new(),
            asks: Vec::new(),
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

    /// The requests of the workload's audit of the whole database, if it has one.
    #[must_use]
    pub fn final_requests(&self) -> Vec<Request> {
        self.workload.final_requests()
    }

    /// Lets the workload check everything that its final requests read.
    ///
    /// # Errors
    /// If an invariant does not hold.
    pub fn audit_end(&self) -> Result<(), String> {
        self.workload.audit_end(&self.final_state)
    }

    /// Read-only transactions over every key that a committed transaction accessed, if there is an
    /// oracle to check the results.
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
            scan: None,
        };
        keys.chunks(32).map(request).collect()
    }

    /// The number of pending transactions.
    #[must_use]
    pub fn outstanding(&self) -> u32 {
        self.outstanding
    }

    /// The number of transactions submitted so far.
    #[must_use]
    pub fn begun(&self) -> u64 {
        self.begun
    }

    /// The pending transactions, those of the oldest client first, each with its gateway.
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

    /// Submits no new transactions from now on. Pending ones continue.
    pub fn stop(&mut self) {
        self.stopped = true;
    }

    /// An open-loop arrival: a client submits a transaction. Returns when the next arrival is due.
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
        let (counter, serial, watched) = (0, 0, None);
        let client = Client { id, region, gateway, counter, serial, active, session, watched };
        self.clients.push(client);
        slot
    }

    /// A new client id: the client's first, or a new incarnation after an unknown outcome.
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
        let mut request = self.workload.next(issuer, &mut self.rng);
        self.keys.share(request.reads.iter_mut().chain(&mut request.writes));
        self.issue(slot, request, now, false);
    }

    /// Lets one more client submit `request` now, from the first gateway's region, even if the load
    /// was stopped. If it does not commit, the run fails.
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
        if request.kind == Kind::General && !self.abilities.general {
            let mut parts = Ahead::new(request);
            request = parts.next(&*self.workload);
            ahead = Some(Box::new(parts));
        }
        let scan = request.scan.is_some().then(|| Box::new(Scanning::new()));
        if scan.is_some() && !self.abilities.scans {
            let problem = "the protocol cannot scan ranges of keys; use a workload without scans";
            self.note_failure(Err(problem.into()));
        }
        if self.workload.has_scans() {
            self.written.extend(request.writes.iter().cloned());
        }
        let client = self.client(slot);
        client.counter += 1;
        client.active = Some(Box::new(Active {
            ahead,
            scan,
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

    /// Wakes a client. Returns the gateway, the input, and the number of WAN hops before it. None
    /// if the client has moved on, or no gateway is up.
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
        if active.scan.as_ref().is_some_and(|scanning| !scanning.is_reading()) {
            self.wake_scan(slot, now, is_up);
            return None;
        }
        if active.next == Action::Decide {
            let decision = active.decision.clone()?;
            let input = Input::Decide { txn: active.txn, decision };
            return Some((active.gateway, input, active.hops));
        }
        let (scan_gateway, hops) = match &active.scan {
            Some(scanning) => (Some(active.gateway), scanning.hops()),
            None => (None, 0),
        };
        let Some(gateway) = scan_gateway.or_else(|| self.nearest_gateway(slot, is_up)) else {
            // Every gateway is down; retry later.
            let next = active.next;
            self.schedule(slot, now + BACK_OFF * 5, next);
            return None;
        };
        let no_sessions = self.model.no_sessions;
        let client = self.client(slot);
        let home = client.region;
        // The client knows the outcomes of all its earlier transactions: it changes its id when it
        // does not.
        let below = client.counter;
        let Client { active, session, .. } = client;
        let active = active.as_mut()?;
        active.gateway = gateway;
        let mut txn = active.request.to_txn(active.txn, home, below);
        txn.fenced = active.scan.as_ref().and_then(|scanning| scanning.part());
        if !no_sessions && shows_reads(&txn.kind) {
            txn.floors = session.floors_of(txn.reads.iter().chain(&txn.writes));
        }
        let input = match active.next {
            Action::Begin => {
                active.attempt_began = now;
                active.round.clone_from(&txn.reads);
                Input::Begin(txn)
            }
            Action::Resolve | Action::Read | Action::Decide | Action::Ask => {
                active.is_resolved = true;
                // As in the API, the values are not sent again.
                let seen = active.reads.iter().flatten();
                let reads = seen
                    .map(|(key, read)| (key.clone(), Read::without_value(read.compared())))
                    .collect();
                Input::Resolve { txn, reads, decision: active.decision.clone() }
            }
        };
        Some((gateway, input, hops))
    }

    /// The client's own gateway if it is up, else the nearest gateway that is up.
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

    /// The client with the pending transaction `txn` at `gateway`; none if it has moved on.
    fn holder(&self, txn: TxnId, gateway: u32) -> Option<u32> {
        let index = usize::try_from(txn.client.0).ok()?.checked_sub(1)?;
        let slot = *self.slot_of.get(index)?;
        let active = self.clients.get(slot as usize)?.active.as_ref()?;
        (active.txn == txn && active.gateway == gateway).then_some(slot)
    }

    /// True if a client waits for this attempt and the attempt only reads. It has no effect, so a
    /// node that resolves it may read again under its name, at another time.
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
}
