//! The wide-area network: one link for each ordered pair of nodes.
//!
//! Links are *ordered* (like a TCP connection: messages never overtake, loss becomes delay, a
//! partition holds messages) or *unordered* (like UDP: loss, duplication and overtaking).
//! `docs/simulator.md` states the rules, and what they leave out.

use std::collections::VecDeque;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::NodeId;
use orthodrome_core::limits::Limits;
use orthodrome_core::machine::Lane;
use orthodrome_core::rng::Rng;
use orthodrome_core::time::{Duration, Time, nanos};

/// Payload of one packet: Ethernet's 1500 bytes less the IP and TCP headers.
const SEGMENT: u64 = 1_460;

/// The least time for which TCP waits before its second retransmission.
const RETRANSMIT_MIN: u64 = 200_000_000;

/// How one-way delays vary around half of the topology's round trip. Deviations are ratios of the
/// standard deviation to the mean.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Delay {
    /// Constant delays.
    Constant,
    /// Normally distributed, cut off at zero.
    Normal(f64),
    /// Pareto distributed: a minimum, and a heavy tail.
    Pareto(f64),
}

/// The kind of links between nodes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Links {
    /// Like TCP connections.
    Ordered,
    /// Like UDP: each message is duplicated with probability `duplicate`, and delayed by up to one
    /// round trip with probability `reorder`.
    Unordered {
        /// Probability that a message arrives twice.
        duplicate: f64,
        /// Probability that a message is delayed.
        reorder: f64,
    },
}

/// The behaviour of the network without faults.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct NetworkModel {
    /// How delays vary.
    pub delay: Delay,
    /// The kind of links.
    pub links: Links,
    /// Probability that a packet between regions is lost.
    pub loss: f64,
    /// Bytes per second of each link between regions; none if unlimited.
    pub bandwidth: Option<u64>,
    /// The longest time for which an ordered link holds a message: during a partition, behind
    /// earlier messages, or until lost packets have been repeated. After that the connection is
    /// broken, and the messages that it held are lost.
    pub timeout: Duration,
}

impl Default for NetworkModel {
    fn default() -> Self {
        Self {
            delay: Delay::Constant,
            links: Links::Ordered,
            loss: 0.0,
            bandwidth: None,
            timeout: Duration::from_secs(5),
        }
    }
}

/// The effect of a fault on a link. The effects of several faults add up.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Disturbance {
    /// The link is blocked.
    pub blocked: bool,
    /// Added to the probability of loss, in millionths.
    pub loss_ppm: u32,
    /// Added to the probability of duplication, in millionths; unordered links only.
    pub duplicate_ppm: u32,
    /// Added to the one-way delay.
    pub delay: Duration,
}

/// The fate of a message that is sent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fate {
    /// It arrives at this time, and perhaps again at the second time.
    Arrives(Time, Option<Time>),
    /// It is lost.
    Lost,
    /// An ordered link holds it until the partition heals, see [`Network::stall`].
    Stalls,
}

#[derive(Debug)]
struct Link<M> {
    /// One-way delay without variation, in nanoseconds.
    base: u64,
    is_wan: bool,
    blocked: u32,
    loss_ppm: u32,
    duplicate_ppm: u32,
    extra: u64,
    /// The lane for control messages, which goes first.
    control: Track,
    /// The lane for all other messages.
    data: Track,
    /// When the sender last crashed, and the moment after which messages sent were lost by that
    /// crash.
    cut: Option<(Time, Time)>,
    /// The moment at which the last message was sent, and the bytes that were sent at that moment: they
    /// wait for the connection together.
    burst: (Time, usize),
    stalled: VecDeque<Stalled<M>>,
}

/// A message that a blocked link holds.
#[derive(Debug)]
struct Stalled<M> {
    since: Time,
    bytes: usize,
    message: M,
}

/// The progress of one lane of a link.
#[derive(Clone, Copy, Debug, Default)]
struct Track {
    /// An ordered link delivers nothing of this lane before this time.
    last_arrival: Time,
    /// The link is transmitting until this time.
    busy_until: Time,
}

/// All links. `M` is the type of a held message.
#[derive(Debug)]
pub struct Network<M> {
    model: NetworkModel,
    limits: Limits,
    nodes: usize,
    links: Vec<Link<M>>,
    rng: Rng,
}

impl<M> Network<M> {
    /// The links of `cluster`; `nodes` gives each node's dense number. What waits for one link is at
    /// most what `limits` allow.
    #[must_use]
    pub fn new(
        (model, limits): (NetworkModel, Limits),
        cluster: &Cluster,
        nodes: &[NodeId],
        rng: Rng,
    ) -> Self {
        let mut links = Vec::with_capacity(nodes.len() * nodes.len());
        for &from in nodes {
            for &to in nodes {
                let (a, b) = (cluster.region_of(from), cluster.region_of(to));
                let rtt = nanos(cluster.topology.rtt(a, b));
                links.push(Link {
                    base: if from == to { 0 } else { rtt / 2 },
                    is_wan: a != b,
                    blocked: 0,
                    loss_ppm: 0,
                    duplicate_ppm: 0,
                    extra: 0,
                    control: Track::default(),
                    data: Track::default(),
                    cut: None,
                    burst: (Time::ZERO, 0),
                    stalled: VecDeque::new(),
                });
            }
        }
        Self { model, limits, nodes: nodes.len(), links, rng }
    }

    fn at(&self, from: u32, to: u32) -> usize {
        from as usize * self.nodes + to as usize
    }

    fn link(&mut self, from: u32, to: u32) -> &mut Link<M> {
        let at = self.at(from, to);
        self.links.get_mut(at).unwrap_or_else(|| unreachable!("there is a link for every pair"))
    }

    /// True if the two nodes are in different regions.
    #[must_use]
    pub fn is_wan(&self, from: u32, to: u32) -> bool {
        self.links.get(self.at(from, to)).is_some_and(|link| link.is_wan)
    }

    /// Sends a message of `bytes` bytes of data.
    pub fn send(&mut self, now: Time, from: u32, to: u32, bytes: usize) -> Fate {
        self.send_in(Lane::Data, now, (from, to), bytes)
    }

    /// Sends a message of `bytes` bytes in a lane. Control messages leave before waiting data.
    pub fn send_in(&mut self, lane: Lane, now: Time, (from, to): (u32, u32), bytes: usize) -> Fate {
        if from == to {
            return Fate::Arrives(now, None);
        }
        let (model, limits, at) = (self.model, self.limits, self.at(from, to));
        let Some(link) = self.links.get_mut(at) else {
            unreachable!("there is a link for every pair")
        };
        if link.blocked > 0 {
            return match model.links {
                Links::Ordered => Fate::Stalls,
                Links::Unordered { .. } => Fate::Lost,
            };
        }
        let loss = f64::from(link.loss_ppm) / 1e6 + if link.is_wan { model.loss } else { 0.0 };
        let rng = &mut self.rng;
        let mean = link.base + link.extra;
        let delay = Duration::from_nanos(sample(model.delay, mean, rng));
        let bandwidth = link.is_wan.then_some(model.bandwidth).flatten();
        match model.links {
            Links::Ordered => {
                let bandwidth = match throughput_ceiling(loss, 2 * mean) {
                    Some(ceiling) => Some(bandwidth.map_or(ceiling, |limit| limit.min(ceiling))),
                    None => bandwidth,
                };
                if !link.admit(limits, lane, now, (bytes, bandwidth)) {
                    return Fate::Lost;
                }
                let late = retransmission(loss, bytes as u64, 2 * mean, rng);
                if link.track(lane).busy_until.since(now) + late > model.timeout {
                    // The connection breaks. Otherwise a slow link would accumulate messages
                    // without bound, and deliver them long after it has healed.
                    return Fate::Lost;
                }
                let sent = link.transmit(lane, now, bytes as u64, bandwidth);
                let track = link.track(lane);
                let arrival = (sent + delay + late).max(track.last_arrival);
                track.last_arrival = arrival;
                Fate::Arrives(arrival, None)
            }
            Links::Unordered { duplicate, reorder } => {
                if !link.admit(limits, lane, now, (bytes, bandwidth)) {
                    return Fate::Lost;
                }
                let sent = link.transmit(lane, now, bytes as u64, bandwidth);
                let packets = (bytes as u64).div_ceil(SEGMENT).max(1);
                if loss > 0.0 && (0..packets).any(|_| rng.unit() < loss) {
                    return Fate::Lost;
                }
                let duplicate = duplicate + f64::from(link.duplicate_ppm) / 1e6;
                let arrive = |rng: &mut Rng| {
                    let held = reorder > 0.0 && rng.unit() < reorder;
                    let held = if held { rng.range(0, 2 * mean) } else { 0 };
                    sent + delay + Duration::from_nanos(held)
                };
                let first = arrive(rng);
                let again = duplicate > 0.0 && rng.unit() < duplicate;
                let second =
                    again.then(|| arrive(rng) + Duration::from_nanos(rng.range(0, 2 * mean)));
                Fate::Arrives(first, second)
            }
        }
    }

    /// Holds a message that [`Fate::Stalls`] until the partition heals. Messages that have waited
    /// longer than the connection's time-out are lost, and so is this one if it has no room; they are
    /// returned.
    pub fn stall(
        &mut self,
        now: Time,
        (from, to): (u32, u32),
        (lane, bytes): (Lane, usize),
        message: M,
    ) -> Vec<M> {
        let (timeout, limits) = (self.model.timeout, self.limits);
        let link = self.link(from, to);
        let mut lost = expire(&mut link.stalled, now, timeout);
        let waiting = link.stalled.iter().map(|stalled| stalled.bytes).sum();
        if limits.has_room(lane, waiting, bytes) {
            link.stalled.push_back(Stalled { since: now, bytes, message });
        } else {
            lost.push(message);
        }
        lost
    }

    /// Applies a disturbance to a link.
    pub fn disturb(&mut self, from: u32, to: u32, by: Disturbance) {
        let link = self.link(from, to);
        link.blocked += u32::from(by.blocked);
        link.loss_ppm += by.loss_ppm;
        link.duplicate_ppm += by.duplicate_ppm;
        link.extra += nanos(by.delay);
    }

    /// Removes a disturbance. If the link becomes unblocked, the messages that it held are returned
    /// in order, to be sent now. Those that timed out are marked as lost.
    pub fn calm(&mut self, now: Time, from: u32, to: u32, by: Disturbance) -> Released<M> {
        let timeout = self.model.timeout;
        let link = self.link(from, to);
        link.blocked = link.blocked.saturating_sub(u32::from(by.blocked));
        link.loss_ppm = link.loss_ppm.saturating_sub(by.loss_ppm);
        link.duplicate_ppm = link.duplicate_ppm.saturating_sub(by.duplicate_ppm);
        link.extra = link.extra.saturating_sub(nanos(by.delay));
        link.release(now, timeout)
    }

    /// Removes all disturbances of a link.
    pub fn calm_all(&mut self, now: Time, from: u32, to: u32) -> Released<M> {
        let timeout = self.model.timeout;
        let link = self.link(from, to);
        (link.blocked, link.loss_ppm, link.duplicate_ppm, link.extra) = (0, 0, 0, 0);
        link.release(now, timeout)
    }

    /// Node `node` crashed. The messages that it held for others are lost, and so are those that
    /// others held for it. Of its messages in flight, those sent before a random moment still
    /// arrive.
    pub fn crash(&mut self, now: Time, node: u32) -> Vec<M> {
        let mut lost = Vec::new();
        for other in 0..u32::try_from(self.nodes).unwrap_or(u32::MAX) {
            for (from, to) in [(node, other), (other, node)] {
                let back = self.rng.range(0, self.model_delay(from, to));
                let link = self.link(from, to);
                lost.extend(link.stalled.drain(..).map(|stalled| stalled.message));
                if from == node {
                    link.cut = Some((now, now - Duration::from_nanos(back)));
                }
            }
        }
        lost
    }

    /// True if the link is blocked.
    #[must_use]
    pub fn is_blocked(&self, from: u32, to: u32) -> bool {
        self.links.get(self.at(from, to)).is_some_and(|link| link.blocked > 0)
    }

    fn model_delay(&self, from: u32, to: u32) -> u64 {
        self.links.get(self.at(from, to)).map_or(0, |link| link.base + link.extra)
    }

    /// True if a message sent at `sent` was lost because its sender has crashed since.
    #[must_use]
    pub fn was_cut(&self, from: u32, to: u32, sent: Time) -> bool {
        let link = self.links.get(self.at(from, to));
        let cut = link.and_then(|link| link.cut);
        cut.is_some_and(|(crash, after)| after < sent && sent <= crash)
    }
}

/// The messages of a link that was blocked.
#[derive(Debug)]
pub struct Released<M> {
    /// To be sent now, in this order.
    pub send: Vec<M>,
    /// Lost, because the connection timed out.
    pub lost: Vec<M>,
}

impl<M> Link<M> {
    fn track(&mut self, lane: Lane) -> &mut Track {
        match lane {
            Lane::Control => &mut self.control,
            Lane::Data => &mut self.data,
        }
    }

    /// Whether there is room for a message among those that wait for the connection: all that were
    /// sent at this moment, or what the link has not transmitted yet.
    fn admit(
        &mut self,
        limits: Limits,
        lane: Lane,
        now: Time,
        (bytes, bandwidth): (usize, Option<u64>),
    ) -> bool {
        if self.burst.0 != now {
            self.burst = (now, 0);
        }
        let untransmitted = bandwidth.map_or(0, |bandwidth| {
            let time = u128::from(nanos(self.data.busy_until.since(now)));
            usize::try_from(time * u128::from(bandwidth) / 1_000_000_000).unwrap_or(usize::MAX)
        });
        let has_room = limits.has_room(lane, self.burst.1.max(untransmitted), bytes);
        if has_room {
            self.burst.1 += bytes;
        }
        has_room
    }

    /// When the last byte of a message leaves: after earlier messages of its lane, and data after
    /// control.
    fn transmit(&mut self, lane: Lane, now: Time, bytes: u64, bandwidth: Option<u64>) -> Time {
        let Some(bandwidth) = bandwidth else { return now };
        let nanoseconds = u128::from(bytes) * 1_000_000_000 / u128::from(bandwidth.max(1));
        let takes = Duration::from_nanos(u64::try_from(nanoseconds).unwrap_or(u64::MAX));
        self.data.busy_until = self.data.busy_until.max(now) + takes;
        if lane == Lane::Control {
            self.control.busy_until = self.control.busy_until.max(now) + takes;
        }
        self.track(lane).busy_until
    }

    fn release(&mut self, now: Time, timeout: Duration) -> Released<M> {
        if self.blocked > 0 {
            return Released { send: Vec::new(), lost: Vec::new() };
        }
        let lost = expire(&mut self.stalled, now, timeout);
        let send = self.stalled.drain(..).map(|stalled| stalled.message).collect();
        Released { send, lost }
    }
}

fn expire<M>(stalled: &mut VecDeque<Stalled<M>>, now: Time, timeout: Duration) -> Vec<M> {
    let expired = stalled.partition_point(|stalled| stalled.since + timeout < now);
    stalled.drain(..expired).map(|stalled| stalled.message).collect()
}

/// The most that TCP transmits over a path that loses packets: segment / rtt × √(3/2) / √loss
/// (Mathis, Semke, Mahdavi, Ott: "The macroscopic behavior of the TCP congestion avoidance
/// algorithm", 1997, eq. 3). Bytes per second; none without loss.
#[must_use]
pub fn throughput_ceiling(loss: f64, rtt_ns: u64) -> Option<u64> {
    if loss <= 0.0 || rtt_ns == 0 {
        return None;
    }
    let rate = SEGMENT as f64 / (rtt_ns as f64 / 1e9) * (1.5 / loss).sqrt();
    Some(rate as u64)
}

/// The delay that losses add to a message: that of the packet that is lost most often. The first
/// loss costs one round trip (fast retransmit); each further loss costs the retransmission
/// time-out, doubled every time.
fn retransmission(loss: f64, bytes: u64, rtt: u64, rng: &mut Rng) -> Duration {
    if loss <= 0.0 {
        return Duration::ZERO;
    }
    let packets = bytes.div_ceil(SEGMENT).max(1);
    let losses = (0..packets).map(|_| (0..8).take_while(|_| rng.unit() < loss).count()).max();
    let timeout = RETRANSMIT_MIN.max(2 * rtt);
    Duration::from_nanos(match losses.unwrap_or(0) {
        0 => 0,
        count => rtt + timeout * ((1 << (count - 1)) - 1),
    })
}

/// One random delay with this mean.
fn sample(delay: Delay, mean: u64, rng: &mut Rng) -> u64 {
    match delay {
        Delay::Constant => mean,
        Delay::Normal(deviation) => {
            // Box–Muller. The second normal number is not worth storing.
            let radius = (-2.0 * (1.0 - rng.unit()).ln()).sqrt();
            let normal = radius * (std::f64::consts::TAU * rng.unit()).cos();
            (mean as f64 * (1.0 + deviation * normal)).max(0.0) as u64
        }
        Delay::Pareto(deviation) if deviation > 0.0 => {
            // Mean and deviation of a Pareto distribution determine its shape and its minimum.
            let shape = 1.0 + (1.0 + 1.0 / (deviation * deviation)).sqrt();
            let least = mean as f64 * (shape - 1.0) / shape;
            (least / (1.0 - rng.unit()).powf(1.0 / shape)) as u64
        }
        Delay::Pareto(_) => mean,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::topology::Topology;

    const MS: u64 = 1_000_000;

    /// One server in each of two regions 100 ms apart.
    fn network(model: NetworkModel) -> Network<u32> {
        limited(model, Limits::SERVER)
    }

    fn limited(model: NetworkModel, limits: Limits) -> Network<u32> {
        let local = Duration::from_micros(500);
        let topology = Topology::uniform(2, local, Duration::from_millis(100));
        let cluster = Cluster::spread(topology, 1, 0, 1, 1).unwrap();
        let ids: Vec<NodeId> = cluster.nodes().map(|node| node.id).collect();
        Network::new((model, limits), &cluster, &ids, Rng::stream(5, "network", 0))
    }

    /// Delays in milliseconds of messages that are too far apart to wait for each other.
    fn delays(model: NetworkModel, bytes: usize, count: u64) -> Vec<f64> {
        let mut network = network(model);
        let delay = |number: u64| {
            let now = Time::from_millis(number * 60_000);
            match network.send(now, 0, 1, bytes) {
                Fate::Arrives(at, _) => at.since(now).as_secs_f64() * 1_000.0,
                fate @ (Fate::Lost | Fate::Stalls) => panic!("{fate:?}"),
            }
        };
        (0..count).map(delay).collect()
    }

    fn moments(sample: &[f64]) -> (f64, f64) {
        let count = sample.len() as f64;
        let mean = sample.iter().sum::<f64>() / count;
        let variance = sample.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / count;
        (mean, variance.sqrt())
    }

    #[test]
    fn delays_have_the_mean_and_the_deviation_that_was_asked_for() {
        let model = |delay| NetworkModel { delay, ..NetworkModel::default() };
        assert!(delays(model(Delay::Constant), 10, 100).iter().all(|&delay| delay == 50.0));
        let (mean, deviation) = moments(&delays(model(Delay::Normal(0.1)), 10, 50_000));
        assert!((mean - 50.0).abs() < 0.2 && (deviation - 5.0).abs() < 0.1, "{mean} {deviation}");
        let pareto = delays(model(Delay::Pareto(0.2)), 10, 200_000);
        let (mean, deviation) = moments(&pareto);
        assert!((mean - 50.0).abs() < 0.3 && (deviation - 10.0).abs() < 1.0, "{mean} {deviation}");
        let least = pareto.iter().copied().fold(f64::MAX, f64::min);
        assert!(least > 40.0, "a Pareto delay has a floor, and {least} is below it");
    }

    #[test]
    fn nothing_overtakes_on_ordered_links_and_much_does_on_unordered_ones() {
        let arrivals = |links| {
            let delay = Delay::Pareto(0.5);
            let mut network = network(NetworkModel { links, delay, ..NetworkModel::default() });
            let arrive = |number: u64| match network.send(Time(number * MS), 0, 1, 10) {
                Fate::Arrives(at, _) => at,
                fate @ (Fate::Lost | Fate::Stalls) => panic!("{fate:?}"),
            };
            (0..5_000).map(arrive).collect::<Vec<_>>()
        };
        assert!(arrivals(Links::Ordered).is_sorted());
        let unordered = arrivals(Links::Unordered { duplicate: 0.0, reorder: 0.0 });
        let overtaken = unordered.windows(2).filter(|pair| pair[1] < pair[0]).count();
        assert!(overtaken > 500, "only {overtaken} of 5000 were overtaken");
    }

    #[test]
    fn bandwidth_is_shared_by_what_is_sent_together() {
        let bandwidth = Some(1_000_000);
        let mut network = network(NetworkModel { bandwidth, ..NetworkModel::default() });
        let mut send = |now| network.send(Time(now), 0, 1, 10_000);
        // 10 kB take 10 ms each; the second waits for the first.
        assert_eq!(send(0), Fate::Arrives(Time(60 * MS), None));
        assert_eq!(send(0), Fate::Arrives(Time(70 * MS), None));
        assert_eq!(send(100 * MS), Fate::Arrives(Time(160 * MS), None));
    }

    #[test]
    fn control_does_not_wait_for_data_and_takes_its_share() {
        let bandwidth = Some(1_000_000);
        let mut network = network(NetworkModel { bandwidth, ..NetworkModel::default() });
        let mut send = |lane, now, bytes| network.send_in(lane, Time(now), (0, 1), bytes);
        // A second's worth of data, and 10 kB of control behind it, which leaves first.
        assert_eq!(send(Lane::Data, 0, 1_000_000), Fate::Arrives(Time(1_050 * MS), None));
        assert_eq!(send(Lane::Control, 0, 10_000), Fate::Arrives(Time(60 * MS), None));
        assert_eq!(send(Lane::Control, 0, 10_000), Fate::Arrives(Time(70 * MS), None));
        assert_eq!(send(Lane::Data, 0, 10_000), Fate::Arrives(Time(1_080 * MS), None));
    }

    #[test]
    fn loss_on_an_ordered_link_delays_and_limits_throughput_as_mathis_says() {
        // One packet: lost with probability 1 %, which costs a round trip.
        let model = NetworkModel { loss: 0.01, ..NetworkModel::default() };
        let sample = delays(model, 100, 100_000);
        let late = sample.iter().filter(|&&delay| delay > 100.0).count() as f64 / 1e5;
        assert!((late - 0.01).abs() < 0.002, "{late} of the messages were late");
        // 1460 B / 100 ms x sqrt(1.5 / 0.01) = 178.8 kB/s.
        let ceiling = throughput_ceiling(0.01, 100 * MS).unwrap();
        assert!((178_000..180_000).contains(&ceiling), "{ceiling}");
        let mut network = network(NetworkModel { timeout: Duration::from_secs(60), ..model });
        let mut last = Time::ZERO;
        for _ in 0..2_000 {
            match network.send(Time::ZERO, 0, 1, 1_000) {
                Fate::Arrives(at, _) => last = at,
                fate @ (Fate::Lost | Fate::Stalls) => panic!("{fate:?}"),
            }
        }
        let rate = 2_000_000.0 / last.since(Time::ZERO).as_secs_f64();
        assert!((160_000.0..180_000.0).contains(&rate), "{rate} B/s went through");
        assert_eq!(throughput_ceiling(0.0, MS), None);
    }

    #[test]
    fn a_slow_ordered_link_breaks_instead_of_accumulating_messages() {
        let model = NetworkModel { bandwidth: Some(1_000), ..NetworkModel::default() };
        let mut network = network(model);
        // 1 kB takes a second: of what is sent at once, what would wait longer than 5 s is lost.
        let fates: Vec<Fate> = (0..20).map(|_| network.send(Time::ZERO, 0, 1, 1_000)).collect();
        let through = fates.iter().filter(|fate| matches!(fate, Fate::Arrives(..))).count();
        assert_eq!((through, fates.last()), (6, Some(&Fate::Lost)));
        // Once it has caught up, every message gets through again.
        let later = network.send(Time::from_millis(6_000), 0, 1, 1_000);
        assert_eq!(later, Fate::Arrives(Time::from_millis(7_050), None));
    }

    #[test]
    fn unordered_links_lose_and_duplicate_as_often_as_they_should() {
        let links = Links::Unordered { duplicate: 0.1, reorder: 0.0 };
        let mut network = network(NetworkModel { links, loss: 0.2, ..NetworkModel::default() });
        let (mut lost, mut twice) = (0, 0);
        for number in 0..20_000 {
            match network.send(Time(number * MS), 0, 1, 10) {
                Fate::Lost => lost += 1,
                Fate::Arrives(_, Some(_)) => twice += 1,
                Fate::Arrives(_, None) => {}
                Fate::Stalls => panic!("an unordered link held a message"),
            }
        }
        assert!((3_700..4_300).contains(&lost), "{lost} lost");
        assert!((1_400..1_800).contains(&twice), "{twice} duplicated");
    }

    #[test]
    fn a_partition_stalls_one_direction_and_releases_in_order_what_is_not_too_old() {
        let mut network = network(NetworkModel::default());
        let cut = Disturbance { blocked: true, ..Disturbance::default() };
        network.disturb(0, 1, cut);
        network.disturb(0, 1, cut);
        assert_eq!(network.send(Time::ZERO, 0, 1, 10), Fate::Stalls);
        assert!(matches!(network.send(Time::ZERO, 1, 0, 10), Fate::Arrives(..)));
        for (at, message) in [(0, 1), (2_000, 2), (4_000, 3)] {
            let at = Time::from_millis(at);
            assert!(network.stall(at, (0, 1), (Lane::Data, 10), message).is_empty());
        }
        let now = Time::from_millis(6_000);
        let released = network.calm(now, 0, 1, cut);
        assert!(released.send.is_empty(), "a second partition still blocks the link");
        let released = network.calm(now, 0, 1, cut);
        assert_eq!((released.send, released.lost), (vec![2, 3], vec![1]));
        assert!(!network.is_blocked(0, 1));
    }

    #[test]
    fn what_exceeds_the_queue_of_a_connection_is_lost_and_control_finds_room_in_a_full_one() {
        let slow = NetworkModel { bandwidth: Some(100_000), ..NetworkModel::default() };
        // Whether a message is lost that comes `after` ten others of 10 kB.
        let is_lost = |model, is_cut: bool, (lane, bytes), after| {
            let limits = Limits { queue_bytes: 100_000, ..Limits::SERVER };
            let mut network = limited(model, limits);
            if is_cut {
                network.disturb(0, 1, Disturbance { blocked: true, ..Disturbance::default() });
            }
            let mut send = |lane, now, bytes| match network.send_in(lane, now, (0, 1), bytes) {
                Fate::Arrives(..) => false,
                Fate::Lost => true,
                Fate::Stalls => !network.stall(now, (0, 1), (lane, bytes), 0).is_empty(),
            };
            assert!((0..10).all(|_| !send(Lane::Data, Time::ZERO, 10_000)), "it has room for ten");
            send(lane, Time::from_millis(after), bytes)
        };
        for (model, is_cut) in [(NetworkModel::default(), false), (slow, false), (slow, true)] {
            assert!(is_lost(model, is_cut, (Lane::Data, 10_000), 0));
            assert!(!is_lost(model, is_cut, (Lane::Control, 10_000), 0));
            assert!(!is_lost(model, is_cut, (Lane::Data, 1_000), 0), "small ones find room too");
        }
        assert!(!is_lost(NetworkModel::default(), false, (Lane::Data, 10_000), 1));
        assert!(is_lost(slow, false, (Lane::Data, 10_000), 50));
        assert!(!is_lost(slow, false, (Lane::Data, 10_000), 200));
        assert!(is_lost(slow, true, (Lane::Data, 10_000), 200));
    }

    #[test]
    fn after_a_crash_messages_sent_before_a_random_moment_arrive() {
        let (mut lost, mut kept) = (0, 0);
        let mut network = network(NetworkModel::default());
        for number in 1..400 {
            let crash = Time::from_millis(number * 1_000);
            network.crash(crash, 0);
            let cut: Vec<bool> = (0..5)
                .map(|step| network.was_cut(0, 1, crash - Duration::from_millis(step * 10)))
                .collect();
            // Earlier messages are less likely to be lost: if one is kept, all earlier ones are.
            assert!(cut.windows(2).all(|pair| pair[0] >= pair[1]), "{cut:?}");
            lost += cut.iter().filter(|&&is_cut| is_cut).count();
            kept += cut.iter().filter(|&&is_cut| !is_cut).count();
            assert!(!network.was_cut(0, 1, crash + Duration::from_millis(1)));
        }
        assert!(lost > 600 && kept > 600, "{lost} lost, {kept} kept");
    }
}
