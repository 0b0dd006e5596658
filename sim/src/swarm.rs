//! Swarm runs: a seed draws a cluster, a load and a fault schedule. The run must stay safe during
//! the faults, and every transaction must end after they have healed.

mod draw;

use std::cell::{Cell, RefCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::rc::Rc;
use std::sync::Once;

use orthodrome_core::cluster::{Cluster, ClusterError};
use orthodrome_core::id::NodeId;
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::{NO_SESSIONS, Protocol};
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time};
use orthodrome_eval::checker::{self, Model};
use orthodrome_eval::history::History;
use orthodrome_eval::workload::{self, Workload};

pub(crate) use self::draw::leaves_majorities;
use crate::fault::{self, Schedule};
use crate::load::HistorySink;
use crate::promise;
use crate::shrink::shrink;
use crate::simulation::{Failure, FailureKind, Options, Report, Simulation, TraceSink};
pub use crate::unusual::Unusual;

/// What a swarm may draw, and what it checks.
#[derive(Clone)]
pub struct SwarmOptions {
    /// The protocol or variant: one of [`Protocol::NAMES`].
    pub name: &'static str,
    /// The protocol's claimed guarantee. [`promise::model_under`] says what remains of it under
    /// faults.
    pub model: Model,
    /// A mutation of the protocol, which the swarm should catch.
    pub mutation: Option<String>,
    /// The fault profile of every seed; none: each seed draws it.
    pub profile: Option<FaultProfile>,
    /// Run every seed twice and compare the traces.
    pub twins: bool,
    /// The number of runs that may be spent on shrinking a failure.
    pub shrink_budget: u32,
    /// Some seeds have links that lose, duplicate and reorder messages, unless the protocol needs
    /// ordered links ([`Protocol::NEEDS_ORDERED_LINKS`]).
    pub unordered: bool,
    /// Some seeds have disks that damage, swap, lose or roll back data.
    pub bad_disks: bool,
    /// Some seeds have clusters, loads and runs of unusual size, and power cuts
    /// ([`FaultProfile::PowerCuts`]).
    pub unusual: bool,
    /// Seeds may have membership changes and leader transfers.
    pub admin: bool,
    /// In some seeds clocks break their bound.
    pub clock_faults: bool,
    /// In some seeds a minority of the servers stays down for ever.
    pub losses: bool,
    /// Every seed scans, if the protocol can. Otherwise some seeds do, if `unusual` is true.
    pub scans: bool,
    /// Scans do not list names again after they have read. This is a mistake, which the swarm should
    /// catch.
    pub no_second_list: bool,
    /// Watches do not wait for unfinished transactions. This is a mistake, which the swarm should catch.
    pub hasty_watches: bool,
    /// Draws to leave out; all other draws stay the same.
    pub without: OrdSet<Unusual>,
    /// The most transactions of one seed.
    pub transactions: u64,
    /// How long faults last, in simulated time; in some seeds they last longer.
    pub safety: Duration,
    /// How long every transaction may take to end after the faults have healed, in simulated time.
    /// If the protocol queues ([`Protocol::QUEUES`]) or links keep losing packets, the bound is on
    /// the time until the next transaction ends.
    pub liveness: Duration,
    /// The most events of one seed; a seed with more fails. A seed that simulates minutes has some
    /// hundred thousand.
    pub events: u64,
}

impl SwarmOptions {
    /// Options for the protocol called `name`.
    #[must_use]
    pub fn of(name: &'static str) -> Self {
        Self {
            name,
            model: Model::StrictSerializable,
            mutation: None,
            profile: None,
            twins: false,
            shrink_budget: 200,
            unordered: true,
            bad_disks: true,
            unusual: true,
            admin: true,
            clock_faults: true,
            losses: true,
            scans: false,
            no_second_list: false,
            hasty_watches: false,
            without: OrdSet::new(),
            transactions: 300,
            safety: Duration::from_secs(8),
            liveness: Duration::from_secs(60),
            events: 30_000_000,
        }
    }
}

/// All draws of a seed.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// The seed.
    pub seed: u64,
    /// The fault profile.
    pub profile: FaultProfile,
    /// Regions, nodes and partitions.
    pub cluster: Cluster,
    /// The workload, as `eval` names it.
    pub workload: &'static str,
    /// Its options.
    pub workload_options: workload::Options,
    /// Models and load.
    pub options: Options,
    /// True if the protocol's settings are drawn too. Otherwise they follow from the cluster.
    pub varies_settings: bool,
    /// How long faults last.
    pub safety: Duration,
    /// The fault schedule.
    pub schedule: Schedule,
    /// Nodes that stay down when all other faults heal.
    pub down: Vec<NodeId>,
    /// The unusual draws that it has.
    pub unusual: OrdSet<Unusual>,
    /// The unusual draws that were left out.
    pub without: OrdSet<Unusual>,
}

/// The fault profile of a seed: it biases the seed to one class of faults. Rare bugs need several
/// rare events at once, which even ten thousand unbiased seeds may not contain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultProfile {
    /// No bias.
    Mixed,
    /// Clocks differ by several round trips, within their stated bound; messages are late; many
    /// transactions read several of the same few keys.
    ClockSkew,
    /// Leaders change all the time, by order and by crashes with short gaps. Some clients are far
    /// away and retry early.
    LeaderChurn,
    /// Servers and regions are cut off for long, more from other servers than from their clients.
    Partitions,
    /// Half of the transactions have high priority. All meet on a few keys whose leaders are far
    /// apart, so that what one leader has decided another does not know yet; leaders change, or lose power
    /// together with votes that did not arrive. For protocols with [`Protocol::RANKS`].
    PriorityRaces,
    /// One server's messages arrive late at another, and clients retry early, so that replicas
    /// differ for long. Disks are slow, and crashes lose unsynced writes. There are few keys, read
    /// as often as written. For protocols with [`Protocol::LAGS`].
    LaggingReplicas,
    /// A leader is cut off from its followers and then loses power for long; some followers lose
    /// power for a moment. So the promises of replicas must be on their disks. For protocols with
    /// [`Protocol::promises_alone`].
    PowerCuts,
}

impl FaultProfile {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Mixed,
        Self::ClockSkew,
        Self::LeaderChurn,
        Self::Partitions,
        Self::PriorityRaces,
        Self::LaggingReplicas,
        Self::PowerCuts,
    ];

    /// Its name in commands.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mixed => "mixed",
            Self::ClockSkew => "clock-skew",
            Self::LeaderChurn => "leader-churn",
            Self::Partitions => "partitions",
            Self::PriorityRaces => "priority-races",
            Self::LaggingReplicas => "lagging-replicas",
            Self::PowerCuts => "power-cuts",
        }
    }

    /// The profile of this name.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|profile| profile.name() == name)
    }
}

/// A failing seed, shrunk.
#[derive(Clone, Debug)]
pub struct Found {
    /// The failure in the smallest run found.
    pub failure: Failure,
    /// The failure in the run as it was drawn.
    pub original: Failure,
    /// The smallest run found: the same seed with fewer unusual draws, faults and transactions.
    pub scenario: Scenario,
    /// The number of runs spent on shrinking.
    pub trials: u32,
}

/// The result of one seed.
#[derive(Clone, Debug)]
pub struct SeedResult {
    /// The seed.
    pub seed: u64,
    /// The failure, if there was one.
    pub found: Option<Found>,
    /// The result of the run with all draws.
    pub first: ScenarioResult,
}

/// Runs `seed` for protocol `P`, and shrinks it if it fails.
///
/// # Errors
/// If the protocol does not have the mutation, or the cluster cannot be drawn.
pub fn run_seed<P: Protocol>(seed: u64, options: &SwarmOptions) -> Result<SeedResult, SwarmError> {
    run_seed_with::<P>(seed, options, None)
}

/// The same, but `change` changes the settings after everything is drawn.
///
/// # Errors
/// As [`run_seed`].
pub fn run_seed_with<P: Protocol>(
    seed: u64,
    options: &SwarmOptions,
    change: Option<fn(&mut P::Config)>,
) -> Result<SeedResult, SwarmError> {
    if let Some(mutation) = &options.mutation
        && !P::mutations(options.name).contains(&mutation.as_str())
    {
        let known = P::mutations(options.name).join(", ");
        return Err(SwarmError::Mutation { mutation: mutation.clone(), known });
    }
    let scenario = Scenario::draw::<P>(seed, options)?;
    let run = |scenario: &Scenario| record::<P>(scenario, options, change, None, None);
    let first = run(&scenario)?;
    let mut failure = first.failure.clone();
    if options.twins && failure.is_none() {
        let second = run(&scenario)?;
        if second.trace_hash != first.trace_hash || second.failure.is_some() {
            let detail = format!(
                "two runs of one seed differ: trace hash {:016x}, then {:016x}",
                first.trace_hash, second.trace_hash
            );
            failure = Some(Failure { at: Time::ZERO, kind: FailureKind::Twins, detail });
        }
    }
    let found = match failure {
        Some(original) => {
            let draw = |without: &OrdSet<Unusual>| {
                let options = SwarmOptions { without: without.clone(), ..options.clone() };
                Scenario::draw::<P>(seed, &options)
            };
            Some(shrink(&scenario, original, options.shrink_budget, draw, run))
        }
        None => None,
    };
    Ok(SeedResult { seed, found, first })
}

/// The swarm cannot start.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum SwarmError {
    /// No mutation has this name.
    #[error("{mutation:?} is not a mutation of this protocol; use one of {known}")]
    Mutation {
        /// The name.
        mutation: String,
        /// The mutations of the protocol.
        known: String,
    },
    /// The drawn cluster contradicts itself.
    #[error("the seed's cluster is invalid: {0}")]
    Cluster(#[from] ClusterError),
    /// The drawn workload cannot be built.
    #[error("the seed's workload is invalid: {0}")]
    Workload(#[from] workload::WorkloadError),
    /// The schedule does not fit the cluster.
    #[error(transparent)]
    Schedule(#[from] fault::ScheduleError),
}

/// The result of one run of a scenario.
#[derive(Clone, Debug)]
pub struct ScenarioResult {
    /// The failure, if there was one.
    pub failure: Option<Failure>,
    /// The unusual draws that the scenario has.
    pub unusual: OrdSet<Unusual>,
    /// Faults injected, by kind.
    pub injected: OrdMap<&'static str, u64>,
    /// The protocol's rare events, by name.
    pub notes: OrdMap<String, u64>,
    /// Simulated time.
    pub simulated: Duration,
    /// The number of events processed.
    pub events: u64,
    /// The number of attempts in the history, and how many of them have an unknown outcome.
    pub attempts: (u64, u64),
    /// Hash of the trace.
    pub trace_hash: u64,
}

/// Runs one scenario: safety phase, liveness phase, final audit, history check.
///
/// # Errors
/// If the parts of the scenario do not fit together.
pub fn run_scenario<P: Protocol>(
    scenario: &Scenario,
    options: &SwarmOptions,
    trace: Option<TraceSink>,
) -> Result<ScenarioResult, SwarmError> {
    record::<P>(scenario, options, None, trace, None)
}

/// The same, and sends the history to `keep`.
///
/// # Errors
/// If the parts of the scenario do not fit together.
pub fn record_scenario<P: Protocol>(
    scenario: &Scenario,
    options: &SwarmOptions,
    trace: Option<TraceSink>,
    keep: Option<HistorySink>,
) -> Result<ScenarioResult, SwarmError> {
    record::<P>(scenario, options, None, trace, keep)
}

fn record<P: Protocol>(
    scenario: &Scenario,
    options: &SwarmOptions,
    change: Option<fn(&mut P::Config)>,
    trace: Option<TraceSink>,
    mut keep: Option<HistorySink>,
) -> Result<ScenarioResult, SwarmError> {
    let mut run = set_up::<P>(scenario, options, change)?;
    if let Some(sink) = trace {
        run.keep_trace(sink);
    }
    let history = Rc::new(RefCell::new((History::new(), None, (0_u64, 0_u64))));
    let sink = Rc::clone(&history);
    run.keep_history(Box::new(move |entry| {
        let (history, problem, (attempts, unknown)) = &mut *sink.borrow_mut();
        *attempts += 1;
        *unknown += u64::from(entry.complete_us.is_none());
        if let Err(error) = history.push(&entry) {
            problem.get_or_insert(format!("{}: {error}", entry.txn));
        }
        if let Some(keep) = &mut keep {
            keep(entry);
        }
    }));
    let verdict = catch(AssertUnwindSafe(|| phases(&mut run, scenario, options)));
    let mut failure = match verdict {
        Ok(result) => result.err(),
        Err(detail) => Some(Failure { at: run.now(), kind: FailureKind::Panic, detail }),
    };
    let report: Report = run.report();
    let (history, problem, attempts) = history.take();
    if failure.is_none() {
        let model = promise::model_under::<P>(options.model, &scenario.schedule);
        let verdict = checker::check(&history, model);
        let detail = problem.or_else(|| (!verdict.ok).then(|| verdict.to_string()));
        let kind = FailureKind::History;
        failure = detail.map(|detail| Failure { at: run.now(), kind, detail });
    }
    Ok(ScenarioResult {
        failure,
        unusual: scenario.unusual.clone(),
        injected: report.injected,
        notes: report.notes,
        simulated: run.now().since(Time::ZERO),
        events: run.events(),
        attempts,
        trace_hash: report.trace_hash,
    })
}

/// The simulation of a scenario, at time zero.
fn set_up<P: Protocol>(
    scenario: &Scenario,
    options: &SwarmOptions,
    change: Option<fn(&mut P::Config)>,
) -> Result<Simulation<P>, SwarmError> {
    let mut config = P::configure(&scenario.cluster, options.name);
    if scenario.varies_settings {
        P::vary(&mut config, &mut Rng::stream(scenario.seed, "settings", 0));
    }
    if scenario.options.limits != Limits::SERVER {
        P::limit(&mut config, scenario.options.limits);
    }
    if let Some(mutation) = &options.mutation {
        P::enable_mutation(&mut config, mutation);
    }
    if let Some(change) = change {
        change(&mut config);
    }
    let workload = scenario.workload()?;
    let mut with_load = scenario.options.clone();
    with_load.load.no_second_list = options.no_second_list;
    with_load.load.hasty_watches = options.hasty_watches;
    with_load.load.no_sessions = options.mutation.as_deref() == Some(NO_SESSIONS);
    let cluster = scenario.cluster.clone();
    let mut run = Simulation::new(cluster, config, workload, &scenario.schedule, with_load)?;
    run.limit_events(options.events);
    Ok(run)
}

fn phases<P: Protocol>(
    run: &mut Simulation<P>,
    scenario: &Scenario,
    options: &SwarmOptions,
) -> Result<(), Failure> {
    run.start_nodes();
    run.start_load();
    run.run_until(Time::ZERO + scenario.safety)?;
    if run.is_beyond() {
        return Ok(());
    }
    run.heal_all(&scenario.down);
    // New transactions continue for a while: a system that only finishes old ones is not live.
    run.run_until(Time::ZERO + scenario.options.duration)?;
    // Loss permanently reduces a link's throughput, as in TCP. More transactions may have arrived
    // than the links sustain; then the rest is slow, not stuck.
    if P::QUEUES || scenario.options.network.loss > 0.0 {
        run.drain_while_moving(options.liveness)?;
    } else {
        run.drain(options.liveness)?;
    }
    if scenario.options.network.loss > 0.0 {
        run.settle_while_moving(options.liveness)?;
    } else {
        run.settle(options.liveness)?;
    }
    run.audit()
}

impl Scenario {
    fn workload(&self) -> Result<Box<dyn Workload>, SwarmError> {
        Ok(workload::parse(self.workload, &self.workload_options)?)
    }
}

thread_local! {
    /// True while this thread expects panics, and wants their messages without printing them.
    static CATCHING: Cell<bool> = const { Cell::new(false) };
    static CAUGHT: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `act`. A panic becomes its message and location.
fn catch<T>(act: impl FnOnce() -> T + std::panic::UnwindSafe) -> Result<T, String> {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            if CATCHING.get() {
                CAUGHT.set(info.to_string().replace('\n', " "));
            } else {
                before(info);
            }
        }));
    });
    CATCHING.set(true);
    let result = catch_unwind(act);
    CATCHING.set(false);
    result.map_err(|_| CAUGHT.take())
}

#[cfg(test)]
mod tests {
    use super::draw::{draw_options, draw_topology, draw_workload};
    use super::*;
    use crate::fault::Fault;

    fn entry(at_ms: u64) -> fault::Entry {
        let fault = Fault::Crash { nodes: vec!["n1".into()] };
        fault::Entry { at_ms, until_ms: Some(at_ms + 1), fault }
    }

    /// A scenario without these draws.
    fn scenario(without: &OrdSet<Unusual>) -> Scenario {
        let mut rng = Rng::stream(1, "shrinking", 0);
        let profile = FaultProfile::Mixed;
        let options = SwarmOptions::of("none");
        let topology = draw_topology(profile, 3, &mut rng);
        let (workload, workload_options) = draw_workload(profile, &mut rng);
        let mut unusual = OrdSet::from(Unusual::ALL);
        unusual.retain(|draw| !without.contains(draw));
        Scenario {
            seed: 1,
            profile,
            cluster: Cluster::spread(topology, 1, 1, 1, 3).unwrap(),
            workload,
            workload_options,
            options: draw_options(1, profile, &options, &mut rng),
            varies_settings: false,
            safety: options.safety,
            schedule: Schedule { faults: (1..=20).map(entry).collect(), ..Schedule::default() },
            down: Vec::new(),
            unusual,
            without: without.clone(),
        }
    }

    fn result(failure: Option<Failure>) -> ScenarioResult {
        ScenarioResult {
            failure,
            unusual: OrdSet::new(),
            injected: OrdMap::new(),
            notes: OrdMap::new(),
            simulated: Duration::ZERO,
            events: 0,
            attempts: (0, 0),
            trace_hash: 0,
        }
    }

    #[test]
    fn a_failing_seed_is_shrunk_past_scenarios_that_cannot_be_set_up() {
        let failure = |detail: &str| {
            let (at, kind) = (Time::ZERO, FailureKind::History);
            Failure { at, kind, detail: detail.into() }
        };
        let none = || SwarmError::Workload(workload::WorkloadError::Unknown("none".into()));
        // Without the draw of few keys nothing can be drawn. The workload needs the shares, and
        // half of its transactions.
        let draw = |without: &OrdSet<Unusual>| {
            if without.contains(&Unusual::Keys) { Err(none()) } else { Ok(scenario(without)) }
        };
        let run = |scenario: &Scenario| {
            let at: Vec<u64> = scenario.schedule.faults.iter().map(|fault| fault.at_ms).collect();
            let draws = |draw| scenario.unusual.contains(&draw);
            // A fault that only such links can have.
            let is_refused = at.contains(&7) && !draws(Unusual::Links);
            if is_refused || !draws(Unusual::Shares) || scenario.options.load.transactions_max < 75
            {
                return Err(none());
            }
            // With all faults it fails only on slow processors.
            let fails = at.contains(&7) && (draws(Unusual::Processors) || at.len() < 20);
            Ok(result(fails.then(|| failure(&format!("with {} faults", at.len())))))
        };
        let whole = scenario(&OrdSet::new());
        let found = shrink(&whole, failure("first"), 200, draw, run);
        let needed: Vec<Unusual> = found.scenario.unusual.iter().copied().collect();
        assert_eq!(needed, [Unusual::Keys, Unusual::Shares, Unusual::Links]);
        assert_eq!(found.scenario.schedule.faults, [entry(7)]);
        assert_eq!(found.scenario.options.load.transactions_max, 75);
        assert_eq!(found.failure, failure("with 1 faults"));
        assert_eq!(found.original, failure("first"));
        assert!(found.trials > 20 && found.trials < 60, "{}", found.trials);
        let untried = shrink(&whole, failure("first"), 0, draw, run);
        assert_eq!((untried.scenario.unusual.len(), untried.trials), (Unusual::ALL.len(), 0));
    }

    #[test]
    fn unusual_draws_and_profiles_are_found_by_their_names() {
        for draw in Unusual::ALL {
            assert_eq!(Unusual::named(draw.name()), Some(draw));
        }
        assert_eq!(Unusual::named("nothing"), None);
        for profile in FaultProfile::ALL {
            assert_eq!(FaultProfile::named(profile.name()), Some(profile));
        }
        assert_eq!(FaultProfile::named("nothing"), None);
    }
}
