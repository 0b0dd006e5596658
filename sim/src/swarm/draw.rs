//! The draws of a seed: a cluster, a load, and the faults.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::NodeId;
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Protocol;
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::Duration;
use orthodrome_core::topology::Topology;
use orthodrome_eval::metrics::Retry;
use orthodrome_eval::workload::{self, ReadOnlyAs};

use super::{FaultProfile, Scenario, SwarmError, SwarmOptions};
use crate::clock::ClockModel;
use crate::cpu::CpuModel;
use crate::disk::DiskModel;
use crate::fault::{self, Fault, Schedule};
use crate::load::{Arrival, LoadModel};
use crate::network::{Delay, Links, NetworkModel};
use crate::simulation::Options;
use crate::unusual::{self, Draws, Sizes, Unusual};

/// The most faults of one seed; a partition of an unusual shape may add a few.
const FAULTS_MAX: usize = 80;

impl Scenario {
    /// Draws everything from `seed`.
    ///
    /// # Errors
    /// If the cluster contradicts itself.
    pub fn draw<P: Protocol>(seed: u64, options: &SwarmOptions) -> Result<Self, SwarmError> {
        let mut rng = Rng::stream(seed, "swarm", 0);
        let drawn = FaultProfile::draw_for::<P>(seed, options, &mut rng);
        let profile = options.profile.unwrap_or(drawn);
        let without = options.without.clone();
        let mut draws = Draws::new(&without);
        let sizes = Sizes::draw(seed, options, &mut draws);
        let safety = sizes.safety.unwrap_or(options.safety);
        let options = &SwarmOptions { safety, ..options.clone() };
        let mut drawing = Drawing { seed, profile, sizes, options, draws, rng };
        let (cluster, moves) = drawing.cluster::<P>()?;
        let (workload, workload_options) = drawing.workload::<P>();
        let models = drawing.models::<P>(&cluster);
        let varies_settings = drawing.varies_settings();
        let (schedule, down) = drawing.faults::<P>(&cluster, moves, &models.network);
        let unusual = drawing.draws.taken;
        Ok(Self {
            seed,
            safety,
            profile,
            cluster,
            workload,
            workload_options,
            options: models,
            varies_settings,
            schedule,
            down,
            unusual,
            without,
        })
    }
}

/// The draws of one seed so far. Each draw from `rng` depends on all earlier ones. A draw from a
/// separate stream changes no other draw, so the other draws are the same for every protocol.
struct Drawing<'a> {
    seed: u64,
    profile: FaultProfile,
    sizes: Sizes,
    options: &'a SwarmOptions,
    draws: Draws<'a>,
    rng: Rng,
}

impl Drawing<'_> {
    /// Regions, servers, partitions and replicas; and the operators who will move partitions.
    fn cluster<P: Protocol>(&mut self) -> Result<(Cluster, Moves), SwarmError> {
        let (seed, profile, options, rng) = (self.seed, self.profile, self.options, &mut self.rng);
        let regions = 3 + rng.below(3);
        // Coordinators that are no replicas of the partitions that they coordinate.
        let regions = if profile == FaultProfile::PowerCuts { 5 } else { regions };
        let topology = draw_topology(profile, regions, rng);
        // Larger groups, and more groups that share only some of their servers.
        let often = if profile == FaultProfile::LaggingReplicas { 2 } else { 1 };
        let mut replicas = if regions == 5 && rng.chance(often, 3) { 5 } else { 3 };
        replicas = self.sizes.replicas.unwrap_or(replicas);
        if !P::REPLICATED {
            replicas = 1;
        }
        let mut servers = 1 + u32::from(rng.chance(often, 4));
        servers = servers.max(replicas.div_ceil(u32::try_from(regions).unwrap_or(1)));
        let mut divided = Rng::stream(seed, "shares", 0);
        let shares = (P::SHARES && divided.chance(1, 4)).then(|| divided.range(2, 3));
        let shares = self.draws.take(Unusual::Shares, shares).unwrap_or(1);
        let shares = u32::try_from(shares).unwrap_or(1);
        if shares > 1 {
            // With and without spare servers.
            servers = servers.max(shares + u32::try_from(divided.below(3)).unwrap_or_default());
        }
        let moves = self.draws.take(Unusual::Moves, Moves::draws_of::<P>(seed, options));
        let mut moves = Moves(moves);
        servers = moves.servers(servers);
        let has_several = !matches!(
            profile,
            FaultProfile::Mixed | FaultProfile::LeaderChurn | FaultProfile::Partitions
        );
        let partitions = rng.range(if has_several { 2 } else { 1 }, 5);
        let partitions = self.sizes.partitions.or(u32::try_from(partitions).ok()).unwrap_or(1);
        let cluster = Cluster::spread(topology, servers, 1, partitions, replicas)?;
        Ok((cluster.divided(shares)?, moves))
    }

    fn workload<P: Protocol>(&mut self) -> (&'static str, workload::Options) {
        let seed = self.seed;
        let (mut workload, mut options) = draw_workload(self.profile, &mut self.rng);
        let scanning = unusual::draw_scans::<P>(seed, self.options, &options);
        if let Some(scanning) = self.draws.take(Unusual::Scans, scanning) {
            (workload, options) = scanning;
        } else {
            let deleting =
                unusual::draw_deletions(seed, &options).filter(|_| !P::FORGETS_DELETIONS);
            let leases = unusual::draw_leases(seed, &options).filter(|_| !P::FORGETS_DELETIONS);
            if let Some(deleting) = self.draws.take(Unusual::Deletions, deleting) {
                (workload, options) = deleting;
            } else if let Some(leases) = self.draws.take(Unusual::Leases, leases) {
                (workload, options) = leases;
            }
        }
        // Smallbank has four hot users, and at least two others.
        let fewest = if workload == "smallbank" { 6 } else { 1 };
        let keys = self.sizes.keys.map(|keys| keys.max(fewest));
        options.keys = keys.or(options.keys);
        if P::GENERAL && workload == "list-append" {
            let mut rng = Rng::stream(seed, "general", 0);
            options.dependent = rng.pick(&[0.0, 0.3, 0.7, 1.0]).copied();
        }
        let stale = (P::STALE_READS && Rng::stream(seed, "stale", 0).chance(1, 6))
            .then_some(ReadOnlyAs::Stale);
        let stale = self.draws.take(Unusual::StaleReads, stale);
        options.read_only_as = stale.or(options.read_only_as);
        (workload, options)
    }

    /// Network, clocks, disks, processors and limits, and how transactions arrive.
    fn models<P: Protocol>(&mut self, cluster: &Cluster) -> Options {
        let (seed, options) = (self.seed, self.options);
        let mut run = draw_options(seed, self.profile, options, &mut self.rng);
        run.cpu = self.draws.take(Unusual::Processors, run.cpu);
        let loss = Some(self.sizes.loss.unwrap_or(run.network.loss)).filter(|loss| *loss > 0.0);
        run.network.loss = self.draws.take(Unusual::Loss, loss).unwrap_or(0.0);
        let links = self.draws.take(Unusual::Links, unusual::draw_links::<P>(seed, options));
        run.network.links = links.unwrap_or(Links::Ordered);
        let limits = Some(draw_limits(seed)).filter(|limits| {
            *limits != Limits::SERVER && P::limit(&mut P::configure(cluster, options.name), *limits)
        });
        run.limits = self.draws.take(Unusual::Limits, limits).unwrap_or(Limits::SERVER);
        run
    }

    /// Whether the protocol's settings are drawn too.
    fn varies_settings(&mut self) -> bool {
        let often = if self.profile == FaultProfile::LeaderChurn { 3 } else { 2 };
        let varies = self.rng.chance(often, 4);
        self.draws.take(Unusual::Settings, varies.then_some(())).is_some()
    }

    /// The fault schedule, and the nodes that stay down when all other faults heal.
    fn faults<P: Protocol>(
        &mut self,
        cluster: &Cluster,
        mut moves: Moves,
        network: &NetworkModel,
    ) -> (Schedule, Vec<NodeId>) {
        let (seed, options) = (self.seed, self.options);
        let mut schedule = Schedule::default();
        // Some seeds have no faults at all.
        if self.rng.chance(9, 10) {
            schedule.faults = draw_faults(cluster, self.profile, network, options, &mut self.rng);
        }
        schedule.faults.extend(moves.draw(cluster, options));
        // Who takes the place of a member needs all others to copy from, and so does a new disk.
        let is_moving =
            schedule.faults.iter().any(|it| matches!(it.fault, Fault::ChangeMembers { .. }));
        let replaced = draw_replaced::<P>(seed, cluster, options);
        let may_replace = !(P::MEMBERS && is_moving);
        let replaced = Some(replaced).filter(|replaced| !replaced.is_empty() && may_replace);
        let replaced = self.draws.take(Unusual::Replaced, replaced).unwrap_or_default();
        let (replaced, entries): (Vec<NodeId>, Vec<fault::Entry>) = replaced.into_iter().unzip();
        schedule.faults.extend(entries);
        let mut down = self.losses(cluster, &replaced, is_moving);
        let disks = unusual::draw_disks(seed, cluster, options);
        let disks = Some(disks).filter(|disks| !disks.is_empty());
        schedule.faults.extend(self.draws.take(Unusual::Disks, disks).unwrap_or_default());
        let dead_region = if is_moving {
            None
        } else {
            unusual::draw_dead_region(seed, cluster, options, &replaced)
        };
        if let Some((dead, entry)) = self.draws.take(Unusual::DeadRegion, dead_region) {
            schedule.faults.push(entry);
            if P::OUTLIVES_GATEWAYS {
                down = dead;
            }
        }
        (schedule, down)
    }

    /// Servers that stay down for ever, in some seeds without membership changes. Together with the
    /// `replaced` ones they leave a majority of each partition's replicas.
    fn losses(&mut self, cluster: &Cluster, replaced: &[NodeId], has_admin: bool) -> Vec<NodeId> {
        let (mut down, mut lost) = (Vec::new(), replaced.to_vec());
        if self.options.losses && !has_admin && self.rng.chance(1, 3) {
            let mut servers: Vec<NodeId> = cluster.servers().map(|node| node.id).collect();
            self.rng.shuffle(&mut servers);
            for server in servers {
                if leaves_majorities(cluster, &lost, server) {
                    lost.push(server);
                    down.push(server);
                }
            }
        }
        let down = Some(down).filter(|down| !down.is_empty());
        self.draws.take(Unusual::Losses, down).unwrap_or_default()
    }
}

impl FaultProfile {
    /// The profile of a seed for protocol `P`. The profiles of some protocols come from separate
    /// streams.
    fn draw_for<P: Protocol>(seed: u64, options: &SwarmOptions, rng: &mut Rng) -> Self {
        let mut drawn = Self::draw(options.admin, rng);
        if P::RANKS && Rng::stream(seed, "ranks", 0).chance(1, 4) {
            drawn = Self::PriorityRaces;
        }
        if P::LAGS && Rng::stream(seed, "lags", 0).chance(1, 8) {
            drawn = Self::LaggingReplicas;
        }
        if options.unusual
            && P::promises_alone(options.name)
            && Rng::stream(seed, "power", 0).chance(1, 8)
        {
            drawn = Self::PowerCuts;
        }
        drawn
    }

    /// A profile, each as often as its weight; `admin` if operators may change leaders.
    fn draw(admin: bool, rng: &mut Rng) -> Self {
        match rng.below(8) {
            0..3 => Self::Mixed,
            3 | 4 => Self::ClockSkew,
            5 | 6 if admin => Self::LeaderChurn,
            _ => Self::Partitions,
        }
    }
}

/// Regions at random places; or some close together and the others far away, so that whole
/// transactions between near regions begin and end while one message travels to a far one.
pub(super) fn draw_topology(profile: FaultProfile, regions: u64, rng: &mut Rng) -> Topology {
    let near_and_far = !matches!(profile, FaultProfile::Mixed | FaultProfile::PriorityRaces);
    let near = if near_and_far { rng.range(0, 1) * (regions - 1) } else { 0 };
    // One seed of a profile has time for several elections, or for delays of many round trips.
    let furthest = rng.range(10, if near_and_far { 50 } else { 150 });
    let local = Duration::from_micros(rng.range(100, 1_000));
    #[expect(clippy::cast_possible_truncation, reason = "at most five regions")]
    Topology::from_fn(regions as u16, local, |a, b| {
        let are_near = u64::from(a.max(b)) < near;
        let most = if are_near { furthest / 5 } else { furthest };
        Duration::from_micros(rng.range(2_000, 2_000 * most))
    })
}

pub(super) fn draw_workload(
    profile: FaultProfile,
    rng: &mut Rng,
) -> (&'static str, workload::Options) {
    use workload::Form;
    let names = ["list-append", "list-append", "bank", "ycsbt:3", "smallbank"];
    let name = rng.pick(&names).copied().unwrap_or("list-append");
    let form = match rng.below(3) {
        0 => Form::Interactive,
        1 => Form::Procedure,
        _ => Form::Mixed,
    };
    let contended = rng.chance(1, 2);
    let mut options = workload::Options {
        keys: Some(if contended { rng.range(8, 20) } else { rng.range(50, 500) }),
        form: Some(form),
        high_priority: Some(if rng.chance(1, 2) { 0.3 } else { 0.0 }),
        ..workload::Options::default()
    };
    match profile {
        // Only a history of lists shows the complete order of transactions.
        FaultProfile::ClockSkew => {
            options.keys = Some(rng.range(8, 30));
            options.read_only = Some(0.4 + rng.unit() * 0.45);
            return ("list-append", options);
        }
        // Enough keys that some can be read although the writers of others are cut off.
        FaultProfile::Partitions => {
            options.keys = Some(rng.range(10, 50));
            options.read_only = Some(0.5 + rng.unit() * 0.45);
            return ("list-append", options);
        }
        FaultProfile::PriorityRaces => {
            options.keys = Some(rng.range(4, 16));
            options.high_priority = Some(0.5);
            return ("list-append", options);
        }
        FaultProfile::PowerCuts => {
            options.keys = Some(rng.range(30, 100));
            options.read_only = Some(0.1 + rng.unit() * 0.2);
            return ("list-append", options);
        }
        FaultProfile::LaggingReplicas => {
            options.keys = Some(rng.range(4, 16));
            options.read_only = Some(0.3 + rng.unit() * 0.4);
            return ("list-append", options);
        }
        FaultProfile::LeaderChurn => options.keys = Some(rng.range(12, 40)),
        FaultProfile::Mixed => {}
    }
    if name == "smallbank" {
        (options.hot_users, options.form) = (Some(4), None);
    }
    (name, options)
}

pub(super) fn draw_options(
    seed: u64,
    profile: FaultProfile,
    swarm: &SwarmOptions,
    rng: &mut Rng,
) -> Options {
    let delay = match rng.below(3) {
        0 => Delay::Constant,
        1 => Delay::Normal(rng.unit() / 5.0),
        _ => Delay::Pareto(rng.unit() / 2.0),
    };
    let loss = if rng.chance(1, 4) { rng.unit() / 50.0 } else { 0.0 };
    let timeout = Duration::from_millis(rng.range(300, 5_000));
    let error = match profile {
        FaultProfile::ClockSkew => Duration::from_millis(rng.range(100, 1_000)),
        // Clocks that differ much make replicas refuse what others store.
        FaultProfile::LaggingReplicas if rng.chance(1, 2) => {
            Duration::from_millis(rng.range(100, 1_000))
        }
        FaultProfile::Mixed
        | FaultProfile::LeaderChurn
        | FaultProfile::Partitions
        | FaultProfile::PriorityRaces
        | FaultProfile::LaggingReplicas
        | FaultProfile::PowerCuts => Duration::from_micros(rng.range(100, 30_000)),
    };
    let retries = if profile == FaultProfile::Mixed { 18 } else { 5 };
    let arrival = draw_arrival(profile, swarm, rng);
    let cores = u32::try_from(rng.range(1, 4)).unwrap_or(1);
    let cpu = rng.chance(1, 2).then(|| CpuModel { cores, ..CpuModel::default() });
    Options {
        seed,
        network: NetworkModel { delay, links: Links::Ordered, loss, bandwidth: None, timeout },
        clock: ClockModel {
            error,
            skew: error,
            period: Duration::from_secs(rng.range(2, 30)),
            ..ClockModel::default()
        },
        disk: DiskModel {
            write: Duration::from_micros(2),
            flush: Duration::from_micros(rng.range(20, 2_000)),
            jitter: Duration::from_micros(if rng.chance(1, 3) { 20_000 } else { 0 }),
        },
        cpu,
        limits: Limits::SERVER,
        load: LoadModel {
            arrival,
            // Few enough that a seed is not mostly a storm of retries at one hot key.
            retry: Retry::up_to(3 + u32::try_from(rng.below(retries)).unwrap_or(0)),
            decide: Duration::from_millis(if rng.chance(1, 3) { rng.below(40) } else { 0 }),
            transactions_max: swarm.transactions,
            die_with_gateway: if rng.chance(1, 2) { 0.0 } else { rng.unit() },
            origins: OrdMap::new(),
            no_sessions: false,
            no_second_list: false,
            hasty_watches: false,
        },
        warmup: Duration::ZERO,
        duration: swarm.safety + swarm.safety / 4,
        drain: swarm.liveness,
        // Invariant checks take most of a run's time, and a violated invariant mostly stays
        // violated.
        invariants_every: if seed.is_multiple_of(32) { 1 } else { 64 },
        check_outcomes: true,
    }
}

fn draw_arrival(profile: FaultProfile, swarm: &SwarmOptions, rng: &mut Rng) -> Arrival {
    if profile != FaultProfile::Mixed || swarm.safety > Duration::from_secs(30) {
        // Spread over the whole time of the faults, and rarely more than the keys in use sustain.
        let evenly = swarm.transactions as f64 / swarm.safety.as_secs_f64();
        Arrival::Open { per_second: evenly * (0.7 + rng.unit()), poisson: true }
    } else if rng.chance(1, 2) {
        Arrival::Open { per_second: 20.0 + rng.unit() * 180.0, poisson: true }
    } else {
        let clients = u32::try_from(rng.range(2, 20)).unwrap_or(2);
        Arrival::Closed { clients, think: Duration::from_millis(rng.below(50)) }
    }
}

/// In some seeds, limits so low that several of its transactions together exceed them by far. Drawn
/// from a separate stream: the other draws are the same for every protocol.
fn draw_limits(seed: u64) -> Limits {
    let mut rng = Rng::stream(seed, "limits", 0);
    if !rng.chance(1, 3) {
        return Limits::SERVER;
    }
    // Above the size of a single transaction: a read of all keys of the largest workload.
    let message_bytes = usize::try_from(rng.range(40 << 10, 160 << 10)).unwrap_or(160 << 10);
    let records = usize::try_from(rng.range(1, 4)).unwrap_or(1);
    // A server refuses a queue that has no room for one message.
    let queued = usize::try_from(rng.range(1, 5)).unwrap_or(1);
    Limits {
        record_bytes: message_bytes * records,
        message_bytes,
        queue_bytes: message_bytes * queued,
    }
}

fn draw_faults(
    cluster: &Cluster,
    profile: FaultProfile,
    network: &NetworkModel,
    options: &SwarmOptions,
    rng: &mut Rng,
) -> Vec<fault::Entry> {
    let is_mixed = profile == FaultProfile::Mixed;
    let mut kinds = fault::Drawn::all(network, options.admin, options.clock_faults && is_mixed);
    rng.shuffle(&mut kinds);
    // A random subset of kinds at a random rate: some kinds are off, others are frequent.
    let keep = 1 + rng.below(kinds.len() as u64);
    kinds.truncate(usize::try_from(keep).unwrap_or(1));
    let end = u64::try_from(options.safety.as_millis()).unwrap_or(u64::MAX);
    let gap = match profile {
        FaultProfile::LeaderChurn | FaultProfile::LaggingReplicas => rng.range(30, 200),
        FaultProfile::Mixed
        | FaultProfile::ClockSkew
        | FaultProfile::Partitions
        | FaultProfile::PriorityRaces => rng.range(100, 1_500),
        FaultProfile::PowerCuts => rng.range(500, 1_500),
    };
    // Long runs have faults for their whole time, too.
    let gap = gap * (options.safety.as_secs() / 8).max(1);
    let mut faults = Vec::new();
    let mut at_ms = 200 + rng.below(gap);
    while at_ms < end && faults.len() < FAULTS_MAX {
        if let Some(sequence) = fault::draw_sequence(profile, cluster, at_ms, rng) {
            faults.extend(sequence);
            at_ms += 1 + rng.below(2 * gap);
            continue;
        }
        let of_profile =
            if rng.chance(3, 4) { fault::draw_for(profile, cluster, rng) } else { None };
        let (lasts, drawn) = of_profile.unwrap_or_else(|| {
            let long = if rng.chance(1, 6) { 6_000 } else { 800 };
            let kind = rng.pick(&kinds).copied();
            (rng.below(long), kind.map_or(Vec::new(), |kind| Fault::draw(kind, cluster, rng)))
        });
        let until_ms = Some(at_ms + 1 + lasts);
        faults.extend(drawn.into_iter().map(|fault| fault::Entry { at_ms, until_ms, fault }));
        at_ms += 1 + rng.below(2 * gap);
    }
    faults
}

/// Operators who move partitions, in some seeds. Drawn from a separate stream: other seeds keep the
/// same draws for every protocol.
struct Moves(Option<Rng>);

impl Moves {
    /// The stream of these draws, if the seed has them.
    fn draws_of<P: Protocol>(seed: u64, options: &SwarmOptions) -> Option<Rng> {
        let mut rng = Rng::stream(seed, "moves", 0);
        let are_drawn = P::MEMBERS && options.admin && rng.chance(1, 3);
        are_drawn.then_some(rng)
    }

    /// Servers in each region. If partitions move, there are mostly enough for a group that shares
    /// no server with the first.
    fn servers(&mut self, drawn: u32) -> u32 {
        let Some(rng) = &mut self.0 else { return drawn };
        if rng.chance(4, 5) { drawn.max(2) } else { drawn }
    }

    fn draw(&mut self, cluster: &Cluster, options: &SwarmOptions) -> Vec<fault::Entry> {
        let Some(rng) = &mut self.0 else { return Vec::new() };
        let end = u64::try_from(options.safety.as_millis()).unwrap_or(u64::MAX);
        fault::draw_moves(cluster, end, rng)
    }
}

/// Servers that lose their disks and are replaced, in some seeds. Drawn from a separate stream: the
/// other draws are the same for every protocol.
fn draw_replaced<P: Protocol>(
    seed: u64,
    cluster: &Cluster,
    options: &SwarmOptions,
) -> Vec<(NodeId, fault::Entry)> {
    let mut rng = Rng::stream(seed, "replace", 0);
    let mut servers = P::replaceable(cluster);
    if !options.losses || !rng.chance(1, 4) {
        return Vec::new();
    }
    rng.shuffle(&mut servers);
    let end = u64::try_from(options.safety.as_millis()).unwrap_or(u64::MAX);
    let (mut lost, mut replaced) = (Vec::new(), Vec::new());
    for server in servers {
        if !leaves_majorities(cluster, &lost, server) {
            continue;
        }
        lost.push(server);
        let at_ms = rng.range(500, end);
        let fault = Fault::Replace { nodes: vec![server.to_string()] };
        let until_ms = Some(at_ms + rng.range(10, 3_000));
        replaced.push((server, fault::Entry { at_ms, until_ms, fault }));
    }
    replaced
}

/// True if a majority of each partition's replicas remains without `lost` and `server`. If there
/// are shares, this also holds for the servers that hold each share.
pub(crate) fn leaves_majorities(cluster: &Cluster, lost: &[NodeId], server: NodeId) -> bool {
    let share = |node| cluster.share_at(node).0;
    let others = cluster.servers().filter(|other| share(other.id) == share(server));
    let others: Vec<NodeId> = others.map(|other| other.id).collect();
    let gone = others.iter().filter(|other| **other == server || lost.contains(other)).count();
    let has_share = cluster.shares() == 1 || gone * 2 < others.len();
    has_share
        && cluster.partitions().all(|placed| {
            let is_lost = |replica: &&NodeId| **replica == server || lost.contains(replica);
            placed.replicas.iter().filter(is_lost).count() * 2 <= placed.replicas.len()
        })
}
