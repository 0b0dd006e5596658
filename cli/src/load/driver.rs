//! Clients in every region, which submit workloads to a cluster through the client library.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use anyhow::Context as _;
use orthodrome_client::Config;
use orthodrome_core::RegionId;
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Reads};
use orthodrome_eval::workload::{Issuer, Reach, Request, Step, Values, Workload};
use orthodrome_sim::floor::Floor;
use orthodrome_sim::load::Origins;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::client::{LoadClient, prefixed};
use super::ranges::Ranges;
use super::results::{Failed, Results};

/// Pause of a client whose request was refused at once, so that it does not retry in a tight loop.
const REFUSED_PAUSE: Duration = Duration::from_millis(100);
/// Number of tries of the final audit; each takes up to the client's deadline.
const AUDITS_MAX: u32 = 4;

/// Pause between these tries.
const AUDIT_PAUSE: Duration = Duration::from_millis(500);

/// A workload that many clients draw from.
#[derive(Debug)]
pub struct Source {
    workload: Mutex<Box<dyn Workload>>,
    /// Its name, parameters included.
    pub name: String,
    /// How its values appear in the history.
    pub values: Values,
    /// Some of its requests scan or watch.
    pub has_scans: bool,
}

impl Source {
    /// Shares a workload.
    pub fn new(workload: Box<dyn Workload>) -> Self {
        let (name, values) = (workload.name(), workload.values());
        let has_scans = workload.has_scans();
        Self { workload: Mutex::new(workload), name, values, has_scans }
    }

    fn lock(&self) -> MutexGuard<'_, Box<dyn Workload>> {
        self.workload.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self, issuer: Issuer, rng: &mut Rng) -> Request {
        self.lock().next(issuer, rng)
    }

    /// See [`Workload::decide`].
    pub fn decide(&self, request: &Request, reads: &Reads) -> Decision {
        self.lock().decide(request, reads)
    }

    /// See [`Workload::step`].
    pub fn step(&self, request: &Request, reads: &Reads) -> Step {
        self.lock().step(request, reads)
    }

    /// See [`Workload::audit`].
    pub fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        self.lock().audit(request, reads)
    }
}

/// A place where some of the clients are.
#[derive(Clone, Debug)]
pub struct Site {
    /// The region.
    pub region: RegionId,
    /// Their configuration: the gateways of their region first, then the others by distance.
    pub config: Config,
}

/// When transactions are submitted.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Pace {
    /// Each client submits its next transaction when the last one has ended.
    Closed,
    /// The same, but clients start one by one, the last of them after this time.
    Rising(Duration),
    /// At a rate over all clients, at random moments, regardless of answers.
    Open {
        /// The rate.
        per_second: f64,
    },
}

/// The plan of a run.
#[derive(Debug)]
pub struct Plan {
    /// Where clients are.
    pub sites: Vec<Site>,
    /// The shares of the load of the regions; clients and arrivals are distributed accordingly.
    pub origins: Origins,
    /// The workloads; each client uses one of them, in turn.
    pub workloads: Vec<Box<dyn Workload>>,
    /// Number of clients.
    pub clients: u32,
    /// When clients submit transactions.
    pub pace: Pace,
    /// The seed of the workloads.
    pub seed: u64,
    /// The prefix of this run's keys; none to take the id of its first client.
    pub prefix: Option<String>,
    /// Names of regions, by id.
    pub regions: Vec<String>,
    /// The latency floors of transactions, if they are known.
    pub floor: Option<Floor>,
    /// The results.
    pub results: Results,
}

/// The state that clients share.
#[derive(Debug)]
pub struct Shared {
    /// The start of the run.
    pub started: Instant,
    /// The prefix of this run's keys.
    pub prefix: String,
    /// What the clients know of ranges of keys.
    pub ranges: Ranges,
    regions: Vec<String>,
    floor: Option<Floor>,
    results: Mutex<Results>,
    stop: watch::Sender<bool>,
}

impl Shared {
    /// The results, locked.
    pub fn results(&self) -> MutexGuard<'_, Results> {
        self.results.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The name of a region.
    pub fn region_name(&self, region: RegionId) -> &str {
        self.regions.get(usize::from(region.0)).map_or("?", String::as_str)
    }

    /// The latency floor of this request.
    pub fn floor(&self, home: RegionId, request: &Request) -> Option<Duration> {
        let floor = self.floor.as_ref()?;
        if self.prefix.is_empty() {
            return Some(floor.of(home, request));
        }
        Some(floor.of(home, &self.moved(request)))
    }

    /// The distance of this request's data.
    pub fn reach(&self, home: RegionId, request: &Request) -> Option<Reach> {
        let floor = self.floor.as_ref()?;
        if self.prefix.is_empty() {
            return Some(floor.reach(home, request));
        }
        Some(floor.reach(home, &self.moved(request)))
    }

    fn moved(&self, request: &Request) -> Request {
        let moved = |keys: &[_]| keys.iter().map(|key| prefixed(&self.prefix, key)).collect();
        let (reads, writes) = (moved(&request.reads), moved(&request.writes));
        Request { reads, writes, ..request.clone() }
    }

    /// Asks all clients to stop after their current request.
    pub fn stop(&self) {
        self.stop.send_replace(true);
    }
}

/// The result of the final audit of one workload.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Audit {
    /// The workload.
    pub workload: String,
    /// The problem that the audit found, if any.
    pub problem: Option<String>,
}

/// A running load.
#[derive(Debug)]
pub struct Driver {
    shared: Arc<Shared>,
    sources: Vec<Arc<Source>>,
    first: Site,
    clients: u32,
    tasks: JoinSet<()>,
}

/// The state of one client's task.
struct Task {
    shared: Arc<Shared>,
    source: Arc<Source>,
    site: Site,
    index: u32,
    rng: Rng,
}

impl Driver {
    /// Connects all clients, then starts them.
    ///
    /// # Errors
    /// A client found no gateway.
    pub async fn start(plan: Plan) -> anyhow::Result<Self> {
        let Plan {
            sites,
            mut origins,
            workloads,
            clients,
            pace,
            seed,
            prefix,
            regions,
            floor,
            results,
        } = plan;
        let arriving = origins.clone();
        let first = sites.first().cloned().context("there is no gateway that clients can use")?;
        let sources: Vec<Arc<Source>> =
            workloads.into_iter().map(|workload| Arc::new(Source::new(workload))).collect();
        let connected = connect_all(&sites, &mut origins, clients).await?;
        let own = connected.first().map(|(_, client)| format!("load-{}/", client.issuer().client));
        let shared = Arc::new(Shared {
            started: Instant::now(),
            prefix: prefix.or(own).unwrap_or_default(),
            ranges: Ranges::default(),
            regions,
            floor,
            results: Mutex::new(results),
            stop: watch::Sender::new(false),
        });
        let mut tasks = JoinSet::new();
        let queues = match pace {
            Pace::Closed | Pace::Rising(_) => None,
            Pace::Open { per_second } => {
                let room = |at| connected.iter().filter(|(site, _)| *site == at).count().max(16);
                let (senders, receivers): (Vec<_>, Vec<_>) =
                    (0..sites.len()).map(|at| mpsc::channel(room(at))).unzip();
                let rng = Rng::stream(seed, "load-arrivals", 0);
                tasks.spawn(arrivals(Arc::clone(&shared), senders, arriving, per_second, rng));
                let share = |queue| Arc::new(tokio::sync::Mutex::new(queue));
                Some(receivers.into_iter().map(share).collect::<Vec<_>>())
            }
        };
        for (at, client) in connected {
            let index = client.issuer().index;
            let turn = index as usize / sites.len();
            let (Some(site), Some(source)) =
                (sites.get(at), sources.get(turn % sources.len().max(1)))
            else {
                continue;
            };
            let task = Task {
                shared: Arc::clone(&shared),
                source: Arc::clone(source),
                site: site.clone(),
                index,
                rng: Rng::stream(seed, "load-caller", index.into()),
            };
            let joins = match pace {
                Pace::Rising(time) => time * index / clients.max(1),
                Pace::Closed | Pace::Open { .. } => Duration::ZERO,
            };
            match queues.as_ref().and_then(|queues| queues.get(at)) {
                None => tasks.spawn(task.closed(client, joins)),
                Some(queue) => tasks.spawn(task.open(client, Arc::clone(queue))),
            };
        }
        Ok(Self { shared, sources, first, clients, tasks })
    }

    /// What the clients share.
    pub fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// Stops the clients, and waits until each knows the outcome of its last request. Then audits
    /// the whole database with every workload that has an audit.
    pub async fn finish(mut self) -> (Arc<Shared>, Vec<Audit>) {
        self.shared.stop();
        while let Some(ended) = self.tasks.join_next().await {
            if let Err(error) = ended {
                self.shared.results().finding(format!("a client of the load failed: {error}"));
            }
        }
        let mut audits = Vec::new();
        for source in &self.sources {
            if let Some(audit) = self.audit(source).await {
                audits.push(audit);
            }
        }
        let (watches, changes) = self.shared.ranges.shown();
        if watches > 0 {
            let workload = format!("{watches} watches, which showed {changes} changes");
            audits.push(Audit { workload, problem: self.shared.ranges.first_missing() });
        }
        (self.shared, audits)
    }

    async fn audit(&self, source: &Source) -> Option<Audit> {
        let requests = source.lock().final_requests();
        if requests.is_empty() {
            return None;
        }
        let workload = source.name.clone();
        let mut problem = None;
        for _ in 0..AUDITS_MAX {
            match self.audit_once(source, &requests).await {
                Ok(found) => return Some(Audit { workload, problem: found }),
                Err(why) => problem = Some(why),
            }
            // A transaction of unknown outcome may have taken effect between two of the requests.
            tokio::time::sleep(AUDIT_PAUSE).await;
        }
        Some(Audit { workload, problem })
    }

    /// Reads everything once. Returns the problem that it finds, or why the result is not known
    /// yet.
    async fn audit_once(
        &self,
        source: &Source,
        requests: &[Request],
    ) -> Result<Option<String>, String> {
        let site = self.first.clone();
        let client = LoadClient::connect(site.config, self.clients, site.region).await;
        let mut client =
            client.map_err(|error| format!("the audit could not read the database: {error}"))?;
        let mut state = Reads::new();
        for request in requests {
            let ended = client.ask(&self.shared, source, request, Instant::now()).await;
            let found = ended.findings.first().cloned();
            self.shared.results().keep(&ended.entries, ended.findings);
            match ended.result {
                Ok(_) if found.is_some() => return Ok(found),
                Ok(_) => {}
                Err(Failed::Aborted(why) | Failed::Unknown(why)) => {
                    return Err(format!("the audit could not read the database: {why}"));
                }
                Err(Failed::Refused) => return Err(
                    "the audit could not read the database: the cluster refused the transaction"
                        .into(),
                ),
            }
            state.extend(ended.reads.unwrap_or_default());
        }
        source.lock().audit_end(&state).map(|()| None)
    }
}

/// Connects clients, distributed over the sites; each with the index of its site.
async fn connect_all(
    sites: &[Site],
    origins: &mut Origins,
    clients: u32,
) -> anyhow::Result<Vec<(usize, LoadClient)>> {
    let mut connecting = JoinSet::new();
    for index in 0..clients {
        let dealt = origins.deal().and_then(|at| Some((at, sites.get(at)?.clone())));
        let Some((at, site)) = dealt else { continue };
        connecting.spawn(async move {
            let client = LoadClient::connect(site.config, index, site.region).await;
            client.map(|client| (at, client))
        });
    }
    let mut connected = Vec::new();
    while let Some(ended) = connecting.join_next().await {
        let client = ended.context("cannot start a client of the load")?;
        connected.push(client.context("a client of the load cannot connect")?);
    }
    connected.sort_by_key(|(_, client)| client.issuer().index);
    Ok(connected)
}

impl Task {
    async fn closed(mut self, client: LoadClient, joins: Duration) {
        let mut client = Some(client);
        let mut stop = self.shared.stop.subscribe();
        // Waits for the client's start or the end of the run, whichever comes first.
        let _ = tokio::time::timeout(joins, stop.wait_for(|stopped| *stopped)).await;
        while !*stop.borrow() {
            self.once(&mut client, Instant::now).await;
        }
    }

    async fn open(
        mut self,
        client: LoadClient,
        queue: Arc<tokio::sync::Mutex<mpsc::Receiver<Instant>>>,
    ) {
        let mut client = Some(client);
        loop {
            let arrival = queue.lock().await.recv().await;
            let Some(arrived) = arrival else { return };
            self.once(&mut client, || arrived).await;
        }
    }

    /// Runs one request; reconnects first if the last one has an unknown outcome.
    async fn once(&mut self, slot: &mut Option<LoadClient>, arrived: impl Fn() -> Instant) {
        let client = match slot {
            Some(client) => client,
            None => {
                let config = self.site.config.clone();
                match LoadClient::connect(config, self.index, self.site.region).await {
                    Ok(client) => slot.insert(client),
                    Err(error) => {
                        self.shared.results().trouble(error.to_string());
                        tokio::time::sleep(REFUSED_PAUSE).await;
                        return;
                    }
                }
            }
        };
        let request = self.source.next(client.issuer(), &mut self.rng);
        let began = Instant::now();
        let ended = client.ask(&self.shared, &self.source, &request, arrived()).await;
        let (is_in_doubt, is_refused) = match &ended.result {
            Err(Failed::Unknown(_)) => (true, false),
            Err(Failed::Aborted(_)) => (false, began.elapsed() < REFUSED_PAUSE),
            Ok(_) | Err(Failed::Refused) => (false, false),
        };
        self.shared.results().record(ended);
        if is_in_doubt {
            // The transaction may still take effect while this client's next requests run. No
            // single client behaves so, so it continues as a new client.
            *slot = None;
        }
        if is_refused {
            tokio::time::sleep(REFUSED_PAUSE).await;
        }
    }
}

/// Sends arrivals to the sites, at random moments, until the run stops.
async fn arrivals(
    shared: Arc<Shared>,
    queues: Vec<mpsc::Sender<Instant>>,
    mut origins: Origins,
    per_second: f64,
    mut rng: Rng,
) {
    let mut stop = shared.stop.subscribe();
    let mut due = tokio::time::Instant::now();
    while let Some(queue) = origins.deal().and_then(|at| queues.get(at)) {
        // Exponential gaps make a Poisson process.
        let gap = -(1.0 - rng.unit()).ln() / per_second;
        due += Duration::from_secs_f64(gap.min(3_600.0));
        tokio::select! {
            () = tokio::time::sleep_until(due) => {}
            _ = stop.wait_for(|stop| *stop) => return,
        }
        // The latency of a request counts from when it was due, even if a client takes it later.
        if queue.try_send(due.into_std()).is_err() {
            shared.results().shed();
        }
    }
}
