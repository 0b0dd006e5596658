//! One transaction's way over the map: which messages were under way when.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{NodeId, TxnId};
use orthodrome_core::time::Time;
use orthodrome_core::trace::{Event, Line};
use serde::Serialize;

use super::Args;
use super::map::{Layout, rounded};
use crate::common::WorkloadArgs;
use crate::sim::{self, Course};

/// So seldom that one transaction is seldom in another's way.
const RATE: f64 = 0.5;
const DURATION: Duration = Duration::from_secs(24);
const WARMUP: Duration = Duration::from_secs(4);

/// One transaction that committed.
#[derive(Serialize)]
pub struct Journey {
    /// The protocol.
    pub protocol: &'static str,
    /// Its name.
    pub txn: String,
    /// The region it began in.
    pub region: String,
    /// From its beginning to its answer.
    pub took_ms: f64,
    /// What was sent meanwhile between regions, in the order of arrival.
    pub steps: Vec<Step>,
}

/// A message.
#[derive(Serialize)]
pub struct Step {
    /// What it is, in one word.
    pub kind: String,
    /// Regions by name, and the nodes.
    pub from: String,
    pub to: String,
    /// Where it goes on the map.
    pub line: [f64; 4],
    /// Since the transaction began.
    pub sent_ms: f64,
    pub at_ms: f64,
    /// It names the transaction. Others may be about it too: what several transactions share names none.
    pub own: bool,
}

/// A transaction of median latency among a few that run by themselves; none if none committed.
///
/// # Errors
/// The simulation cannot begin.
pub fn journey(
    args: &Args,
    protocol: &'static str,
    layout: &Layout,
) -> anyhow::Result<Option<Journey>> {
    let subject = args.placement.subject(protocol)?;
    let cluster = args.placement.cluster_of(&subject)?;
    let workload = WorkloadArgs { rate: Some(RATE), clients: None, ..args.workload.clone() };
    let course = Course { duration: DURATION, warmup: Some(WARMUP), ..args.course.clone() };
    let mut simulation = course.simulation(&subject, cluster.clone(), &workload, course.seed)?;
    let lines: Rc<RefCell<Vec<Line>>> = Rc::default();
    let kept = lines.clone();
    simulation.keep_trace(Box::new(move |line| kept.borrow_mut().push(line.clone())));
    sim::carry_out(&mut *simulation)?;
    drop(simulation);
    let lines = lines.take();
    Ok(median(&lines).map(|way| told(protocol, &way, &lines, &cluster, layout)))
}

/// When and where a transaction began and ended.
#[derive(Clone, Copy, Debug)]
struct Way {
    txn: TxnId,
    node: NodeId,
    began: Time,
    ended: Time,
}

/// One whose latency is the median of those that committed at their first attempt. Of those that wrote, if any
/// did: a protocol is known by how it commits.
fn median(lines: &[Line]) -> Option<Way> {
    let mut ways = Vec::new();
    for end in lines.iter().filter(|line| line.event == Event::Finish) {
        let began = lines.iter().find(|line| line.event == Event::Begin && line.txn == end.txn);
        if let (Some(txn), Some(begin)) = (end.txn, began)
            && end.detail.starts_with("committed")
            && txn.attempt == 0
            && begin.at >= Time::ZERO + WARMUP
        {
            let way = Way { txn, node: end.node, began: begin.at, ended: end.at };
            ways.push((end.kind == "read-only", end.at.since(begin.at), way));
        }
    }
    let has_written = ways.iter().any(|(is_read, ..)| !is_read);
    ways.retain(|(is_read, ..)| !(has_written && *is_read));
    ways.sort_by_key(|(_, took, way)| (*took, way.txn));
    ways.get(ways.len() / 2).map(|(.., way)| *way)
}

fn told(
    protocol: &'static str,
    way: &Way,
    lines: &[Line],
    cluster: &Cluster,
    layout: &Layout,
) -> Journey {
    let map = &cluster.topology;
    let millis = |time: Time| (time.since(way.began).as_secs_f64() * 1e5).round() / 1e2;
    let place = |node| format!("{} {node}", map.name_of(cluster.region_of(node)));
    let step = |line: &Line| {
        let (from, sent) = (line.peer?, line.sent?);
        let (a, b) = (cluster.region_of(from), cluster.region_of(line.node));
        let is_within = sent >= way.began && line.at <= way.ended;
        if line.event != Event::Receive || a == b || !is_within || line.kind.contains("Heartbeat") {
            return None;
        }
        let ((ax, ay), (bx, by)) = (layout.place(a), layout.place(b));
        Some(Step {
            kind: line.kind.clone(),
            from: place(from),
            to: place(line.node),
            line: [ax, ay, bx, by].map(rounded),
            sent_ms: millis(sent),
            at_ms: millis(line.at),
            own: line.txn.is_some_and(|txn| txn.is_same_txn(way.txn)),
        })
    };
    Journey {
        protocol,
        txn: way.txn.to_string(),
        region: map.name_of(cluster.region_of(way.node)).to_owned(),
        took_ms: millis(way.ended),
        steps: lines.iter().filter_map(step).collect(),
    }
}
