//! The messages of one transaction, with the times when they were sent and received, to be drawn on
//! the map.

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

/// A rate so low that transactions rarely run at the same time.
const RATE: f64 = 0.5;
const DURATION: Duration = Duration::from_secs(24);
const WARMUP: Duration = Duration::from_secs(4);

/// One committed transaction.
#[derive(Serialize)]
pub struct Journey {
    /// The protocol.
    pub protocol: &'static str,
    /// The id of the transaction.
    pub txn: String,
    /// The region of its client.
    pub region: String,
    /// Its latency.
    pub took_ms: f64,
    /// The messages between regions that were sent in this time, in the order of arrival.
    pub steps: Vec<Step>,
}

/// A message.
#[derive(Serialize)]
pub struct Step {
    /// The kind of the message.
    pub kind: String,
    /// Names of the regions, and the nodes.
    pub from: String,
    pub to: String,
    /// Start and end of its line on the map.
    pub line: [f64; 4],
    /// Time since the transaction was submitted.
    pub sent_ms: f64,
    pub at_ms: f64,
    /// Whether the message names the transaction. Other messages may also belong to it: a message
    /// for several transactions names none.
    pub own: bool,
}

/// A transaction of median latency from a short run at a very low rate; none if no transaction
/// committed.
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

/// When a transaction began and ended, and at which client.
#[derive(Clone, Copy, Debug)]
struct Way {
    txn: TxnId,
    node: NodeId,
    began: Time,
    ended: Time,
}

/// The transaction with the median latency among those that committed at their first attempt. If
/// any of these wrote, only writing transactions count, because a protocol is characterized by its
/// commits.
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
