//! Finding and naming cycles.

use std::collections::VecDeque;

use super::graph::{Builder, Components, Edge, Graph, Label, Reason, Reasons};
use super::verdict::{Findings, Kind, MAX_OF_A_KIND, Order, Phenomenon, Step};
use super::words::Words;
use crate::history::dense::Dense;

const NONE: u32 = u32::MAX;

/// How many groups of entangled transactions are searched for cycles to show. The rest are counted.
const MAX_GROUPS: usize = 8 * MAX_OF_A_KIND;

/// How many edges the search for ever shorter cycles may follow in all. After that each search is
/// content with the first cycle that it meets; it never misses that there is one.
const BUDGET: u64 = 100_000_000;

const WRITES: Reasons = Reasons::NONE.with(Reason::Ww);
const INFORMATION: Reasons = WRITES.with(Reason::Wr);
const DEPENDENCIES: Reasons = INFORMATION.with(Reason::Rw);

/// One edge between attempts, junctions skipped.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Hop {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) label: Label,
}

/// Reports the cycles of a graph whose first nodes are attempts; a bounded number, but at least one
/// if there is any.
pub(super) fn report(graph: &Graph, words: &Words<'_>, findings: &mut Findings) {
    let groups = graph.components(Reasons::ALL).cyclic();
    let mut budget = BUDGET;
    let mut place = Dense::filled(NONE, graph.len());
    for nodes in groups.iter().take(MAX_GROUPS) {
        let group = Group::new(graph, nodes, words.history.attempts().end, &mut place);
        group.report(words, &mut budget, findings);
    }
    findings.leave_out(groups.len().saturating_sub(MAX_GROUPS) as u64);
}

/// One strongly connected component as a graph of its own.
struct Group<'g> {
    graph: Graph,
    /// The nodes of the whole graph, by number in this one.
    nodes: &'g [u32],
    /// Nodes of the whole graph from here on are junctions.
    attempts: u32,
}

impl<'g> Group<'g> {
    /// `place` is scratch space: [`NONE`] for every node, before and after.
    fn new(whole: &Graph, nodes: &'g [u32], attempts: u32, place: &mut Dense<u32>) -> Self {
        for (number, node) in nodes.iter().enumerate() {
            place[*node] = number as u32;
        }
        let mut builder = Builder::new(nodes.len() as u32);
        for node in nodes {
            for edge in whole.edges(*node).iter().filter(|edge| place[edge.to] != NONE) {
                builder.edge(place[*node], place[edge.to], edge.label);
            }
        }
        for node in nodes {
            place[*node] = NONE;
        }
        Self { graph: builder.build(), nodes, attempts }
    }

    fn node(&self, number: u32) -> u32 {
        self.nodes.get(number as usize).copied().unwrap_or(NONE)
    }

    /// Reports one cycle of each kind that needs nothing but dependencies; only if there is none,
    /// those that also need the order within processes, and only then real time. What is wrong
    /// whatever the order is the stronger finding, and it usually is what broke the order too.
    fn report(&self, words: &Words<'_>, budget: &mut u64, findings: &mut Findings) {
        let process = Reasons::NONE.with(Reason::Process);
        for order in [Reasons::NONE, process, process.with(Reason::RealTime)] {
            let cycles = self.cycles(order, budget);
            if cycles.is_empty() {
                continue;
            }
            for cycle in cycles {
                let kind = kind(&cycle, words);
                findings.add(kind, || {
                    let steps: Vec<Step> = cycle.iter().map(|hop| words.step(*hop)).collect();
                    (problem(kind, &steps), steps)
                });
            }
            return;
        }
    }

    /// At most one cycle of each phenomenon, given an order, the strongest phenomenon first. If
    /// there is a cycle at all then there is one here.
    fn cycles(&self, order: Reasons, budget: &mut u64) -> Vec<Vec<Hop>> {
        let all = self.graph.components(DEPENDENCIES.and(order));
        let mut cycles = Vec::new();
        let mut has_single = false;
        for (through, along) in [
            (Reason::Ww, WRITES),
            (Reason::Wr, INFORMATION),
            (Reason::Rw, INFORMATION),
            (Reason::Rw, DEPENDENCIES),
        ] {
            let is_single = through == Reason::Rw && along == INFORMATION;
            let within = self.graph.components(along.and(order));
            // A cycle through an edge that `along` lacks leaves the components of `along`.
            let within = if is_single { &all } else { &within };
            let Some(cycle) = self.shortest(through, along.and(order), within, budget) else {
                continue;
            };
            let misses = cycle.iter().filter(|hop| hop.label.reason() == Reason::Rw).count();
            if misses != 1 || !has_single {
                cycles.push(cycle);
            }
            has_single |= misses == 1;
        }
        cycles
    }

    /// The shortest cycle of one edge for the reason `through` and otherwise edges for the reasons
    /// `along`; if the budget runs out, the shortest found so far. Only edges within one component
    /// of `within` are tried.
    fn shortest(
        &self,
        through: Reason,
        along: Reasons,
        within: &Components,
        budget: &mut u64,
    ) -> Option<Vec<Hop>> {
        let mut best: Option<(u32, Vec<Hop>)> = None;
        let mut paths = Paths::new(self.graph.len());
        let mut tried = 0_u64;
        for from in 0..self.graph.len() {
            for edge in self.graph.edges(from) {
                if edge.label.reason() != through || !within.are_together(from, edge.to) {
                    continue;
                }
                if tried > 0 && *budget == 0 {
                    return best.map(|(_, cycle)| cycle);
                }
                tried += 1;
                let limit = best.as_ref().map_or(NONE, |(len, _)| len - 2);
                if let Some(len) = paths.find(self, *edge, from, along, limit, budget) {
                    best = Some((len + 1, self.hops(&paths, from, *edge)));
                    if len == 1 {
                        return best.map(|(_, cycle)| cycle);
                    }
                }
            }
        }
        best.map(|(_, cycle)| cycle)
    }

    /// The cycle of `edge` and the path just found from its end back to its start, as hops between
    /// attempts, starting at the attempt that stands first in the history.
    fn hops(&self, paths: &Paths, start: u32, edge: Edge) -> Vec<Hop> {
        let mut edges = Vec::new();
        let mut node = start;
        while node != edge.to {
            let (from, label) = paths.came[node];
            edges.push((label, node));
            node = from;
        }
        edges.push((edge.label, edge.to));
        edges.reverse();
        let mut hops: Vec<Hop> = Vec::new();
        let (mut from, mut label) = (self.node(start), Label::JUNCTION);
        for (next, to) in edges {
            if next.reason() != Reason::Junction {
                label = next;
            }
            let to = self.node(to);
            if to < self.attempts {
                hops.push(Hop { from, to, label });
                from = to;
            }
        }
        let first = hops.iter().enumerate().min_by_key(|(_, hop)| hop.from);
        let first = first.map_or(0, |(place, _)| place);
        hops.rotate_left(first);
        hops
    }
}

/// Shortest paths from one node, edges out of junctions costing nothing.
struct Paths {
    /// How far each node is, valid if `round` matches.
    far: Dense<u32>,
    round: Dense<u32>,
    this_round: u32,
    /// Whence each node was reached, and by which edge.
    came: Dense<(u32, Label)>,
    queue: VecDeque<(u32, u32)>,
}

impl Paths {
    fn new(nodes: u32) -> Self {
        Self {
            far: Dense::filled(0, nodes),
            round: Dense::filled(0, nodes),
            this_round: 0,
            came: Dense::filled((NONE, Label::JUNCTION), nodes),
            queue: VecDeque::new(),
        }
    }

    /// The length of the shortest path from the end of `edge` to `target`, if it is at most
    /// `limit`. Takes what it looks at off the budget, but does not stop when that is used up.
    fn find(
        &mut self,
        group: &Group<'_>,
        edge: Edge,
        target: u32,
        along: Reasons,
        limit: u32,
        budget: &mut u64,
    ) -> Option<u32> {
        self.this_round += 1;
        self.queue.clear();
        self.queue.push_back((edge.to, 0));
        self.far[edge.to] = 0;
        self.round[edge.to] = self.this_round;
        while let Some((node, far)) = self.queue.pop_front() {
            if node == target {
                return Some(far);
            }
            if far > self.far[node] {
                continue;
            }
            for next in group.graph.edges(node) {
                *budget = budget.saturating_sub(1);
                let reason = next.label.reason();
                let cost = u32::from(reason != Reason::Junction);
                let is_nearer =
                    self.round[next.to] != self.this_round || self.far[next.to] > far + cost;
                if !along.has(reason) || far + cost > limit || !is_nearer {
                    continue;
                }
                self.round[next.to] = self.this_round;
                self.far[next.to] = far + cost;
                self.came[next.to] = (node, next.label);
                if cost == 0 {
                    self.queue.push_front((next.to, far));
                } else {
                    self.queue.push_back((next.to, far + cost));
                }
            }
        }
        None
    }
}

fn kind(cycle: &[Hop], words: &Words<'_>) -> Kind {
    let count = |reason| cycle.iter().filter(|hop| hop.label.reason() == reason).count();
    let order = match (count(Reason::RealTime), count(Reason::Process)) {
        (0, 0) => None,
        (0, _) => Some(Order::Process),
        (_, _) => Some(Order::RealTime),
    };
    let phenomenon = match (count(Reason::Rw), count(Reason::Wr)) {
        (0, 0) => Phenomenon::G0,
        (0, _) => Phenomenon::G1c,
        (1, _) => Phenomenon::GSingle,
        (_, _) => Phenomenon::G2Item,
    };
    let is_stale = cycle.len() == 2 && phenomenon == Phenomenon::GSingle && order.is_some();
    if is_stale && cycle.iter().any(|hop| words.is_lost(*hop)) {
        return Kind { phenomenon: Phenomenon::LostAppend, order };
    }
    Kind { phenomenon, order }
}

fn problem(kind: Kind, steps: &[Step]) -> String {
    let txns: Vec<String> = steps.iter().map(|step| step.from.to_string()).collect();
    let txns = txns.join(", ");
    match kind.phenomenon {
        Phenomenon::LostAppend => {
            format!("an append that committed is in no list read after it ({txns})")
        }
        Phenomenon::AmbiguousAppend
        | Phenomenon::GarbageRead
        | Phenomenon::G1a
        | Phenomenon::G1b
        | Phenomenon::DuplicateAppend
        | Phenomenon::IncompatibleOrder
        | Phenomenon::Internal
        | Phenomenon::TimestampTie
        | Phenomenon::G0
        | Phenomenon::G1c
        | Phenomenon::GSingle
        | Phenomenon::G2Item => {
            format!("each of {txns} must come before the next, and the last before the first")
        }
    }
}
