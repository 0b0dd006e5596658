//! Finding and naming cycles.

use std::collections::VecDeque;

use super::graph::{Aside, Builder, Components, Edge, Graph, Label, Reason, Reasons};
use super::verdict::{Findings, Kind, MAX_OF_A_KIND, Order, Phenomenon, Step};
use super::words::Words;
use crate::history::History;
use crate::history::dense::Dense;

const NONE: u32 = u32::MAX;

/// The largest number of groups of entangled transactions that are searched for cycles to show.
/// Further groups are only counted.
const MAX_GROUPS: usize = 8 * MAX_OF_A_KIND;

/// The total number of edges that the searches for shortest cycles may follow. When it is used up,
/// each search returns the first cycle that it finds. A search never misses the existence of a
/// cycle.
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

/// Reports the cycles of a graph whose first nodes are attempts: a bounded number, and at least one
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

/// Judges each attempt outside the graph (a stale read) by itself. It is reported if it reads a
/// write that depends on a transaction which came after another of its reads.
pub(super) fn report_apart(graph: &Graph, words: &Words<'_>, findings: &mut Findings) {
    let apart = graph.apart();
    if apart.is_empty() {
        return;
    }
    // The number of a component is greater than those of the components it leads to.
    let components = graph.components(DEPENDENCIES);
    let mut came = Dense::filled((NONE, NONE, Label::JUNCTION), graph.len());
    for (reader, Aside { before, after }) in apart {
        let lowest = before.iter().map(|(from, _)| components.of[*from]).min();
        let Some(lowest) = lowest else { continue };
        let mut queue = VecDeque::new();
        let mut reached = None;
        for edge in &after {
            came[edge.to] = (reader, reader, edge.label);
            queue.push_back(edge.to);
        }
        while let Some(node) = queue.pop_front() {
            if let Some(&last) = before.iter().find(|(from, _)| *from == node) {
                reached = Some(last);
                break;
            }
            for next in graph.edges(node) {
                let is_new = came[next.to].0 != reader;
                if is_new
                    && DEPENDENCIES.has(next.label.reason())
                    && components.of[next.to] >= lowest
                {
                    came[next.to] = (reader, node, next.label);
                    queue.push_back(next.to);
                }
            }
        }
        let Some((last, label)) = reached else { continue };
        // From the reader and back, as a graph of its own.
        let mut path = vec![(last, label)];
        let mut node = last;
        while node != reader {
            let (_, from, label) = came[node];
            path.push((from, label));
            node = from;
        }
        path.reverse();
        let mut nodes: Vec<u32> = path.iter().map(|(node, _)| *node).collect();
        nodes.sort_unstable();
        let number = |node| nodes.binary_search(&node).map_or(NONE, |number| number as u32);
        let mut builder = Builder::new(nodes.len() as u32);
        let ends = path.iter().skip(1).map(|(node, _)| *node).chain([reader]);
        for (&(from, label), to) in path.iter().zip(ends) {
            builder.edge(number(from), number(to), label);
        }
        let attempts = words.history.attempts().end;
        let group = Group { graph: builder.build(), nodes: &nodes, attempts };
        let mut budget = BUDGET;
        group.report(words, &mut budget, findings);
    }
}

/// One strongly connected component, stored as a separate graph.
struct Group<'g> {
    graph: Graph,
    /// The nodes of the whole graph, indexed by their numbers in this one.
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

    /// Reports one cycle of each kind that needs only dependencies. Only if there is none, it
    /// reports cycles that also need the order within processes, and only then cycles that need
    /// real time. A cycle that is wrong in any order is the stronger finding, and usually the cause
    /// of the others.
    fn report(&self, words: &Words<'_>, budget: &mut u64, findings: &mut Findings) {
        let process = Reasons::NONE.with(Reason::Process);
        for order in [Reasons::NONE, process, process.with(Reason::RealTime)] {
            let cycles = self.cycles(order, words.history, budget);
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

    /// At most one cycle of each phenomenon for this order, the strongest phenomenon first. If any
    /// cycle exists, at least one is returned.
    fn cycles(&self, order: Reasons, history: &History, budget: &mut u64) -> Vec<Vec<Hop>> {
        let mut cycles = Vec::new();
        let all = self.graph.components(DEPENDENCIES.and(order));
        if all.sizes.len() == self.graph.len() {
            return cycles;
        }
        for (through, along) in [(Reason::Ww, WRITES), (Reason::Wr, INFORMATION)] {
            let along = along.and(order);
            let within = self.graph.components(along);
            let search = Search { group: self, history, through, along, within: &within };
            cycles.extend(search.shortest(budget));
        }
        // First cycles with exactly one read that missed a write; then cycles with any number of
        // them. These cycles leave the components of writes and reads-of-writes, so the search
        // covers all components.
        let mut has_single = false;
        for along in [INFORMATION, DEPENDENCIES] {
            let along = along.and(order);
            let search = Search { group: self, history, through: Reason::Rw, along, within: &all };
            let Some(cycle) = search.shortest(budget) else { continue };
            let is_single =
                cycle.iter().filter(|hop| hop.label.reason() == Reason::Rw).count() == 1;
            if !is_single || !has_single {
                cycles.push(cycle);
            }
            has_single |= is_single;
        }
        cycles
    }

    /// The cycle of `edge` and the path from its end back to its start, as hops between attempts.
    /// It begins with the attempt that is first in the history.
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

/// The search for a short cycle that has one edge with the reason `through`, and whose other edges
/// have the reasons `along`. Only edges within one component of `within` are tried.
struct Search<'s> {
    group: &'s Group<'s>,
    history: &'s History,
    through: Reason,
    along: Reasons,
    within: &'s Components,
}

impl Search<'_> {
    /// The shortest such cycle, or, if the budget runs out, the shortest found so far. It finds at
    /// least one if `along` connects the ends of every edge tried.
    fn shortest(&self, budget: &mut u64) -> Option<Vec<Hop>> {
        if let Some(cycle) = self.two_by_time() {
            return Some(cycle);
        }
        let mut paths = Paths::new(self.group.graph.len());
        // Short cycles first. A large group has many of them, and one search for a long path may
        // cost as much as a million searches for short ones.
        for limit in [1, 2, 4, NONE] {
            let reserve = if limit == NONE { 0 } else { *budget / 2 };
            let mut best: Option<(u32, Vec<Hop>)> = None;
            let mut has_tried = limit != NONE;
            for (from, edge) in self.candidates() {
                if has_tried && *budget <= reserve {
                    break;
                }
                has_tried = true;
                let limit = best.as_ref().map_or(limit, |(len, _)| len - 1);
                if let Some(len) = paths.find(self, edge, from, limit, budget) {
                    best = Some((len, self.group.hops(&paths, from, edge)));
                    if len <= 2 {
                        break;
                    }
                }
            }
            if best.is_some() {
                return best.map(|(_, cycle)| cycle);
            }
        }
        None
    }

    fn candidates(&self) -> impl Iterator<Item = (u32, Edge)> + '_ {
        (0..self.group.graph.len()).flat_map(move |from| {
            let edges = self.group.graph.edges(from).iter().copied();
            let tried = edges.filter(move |edge| {
                edge.label.reason() == self.through && self.within.are_together(from, edge.to)
            });
            tried.map(move |edge| (from, edge))
        })
    }

    /// A cycle of one dependency and one real-time edge. Most violations of real time contain such
    /// a cycle, and this search finds it without following real-time edges through the whole group.
    fn two_by_time(&self) -> Option<Vec<Hop>> {
        let closing = |later: u32, earlier: u32| {
            let is_before = self.history.complete_us(earlier) < self.history.invoke_us(later);
            let is_same = self.history.process(earlier) == self.history.process(later);
            let reason = if is_same { Reason::Process } else { Reason::RealTime };
            (is_before && self.along.has(reason)).then(|| Label::new(reason, 0))
        };
        self.candidates().find_map(|(from, edge)| {
            let (from, to) = (self.group.node(from), self.group.node(edge.to));
            if to >= self.group.attempts {
                return None;
            }
            let label = closing(from, to)?;
            let mut hops =
                vec![Hop { from, to, label: edge.label }, Hop { from: to, to: from, label }];
            hops.sort_by_key(|hop| hop.from);
            Some(hops)
        })
    }
}

/// Shortest paths from one node, edges out of junctions costing nothing.
struct Paths {
    /// How far each node is, valid if `round` matches.
    far: Dense<u32>,
    round: Dense<u32>,
    this_round: u32,
    /// The node and the edge by which each node was reached.
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
    /// `limit`. It subtracts its cost from the budget, but does not stop when the budget is used
    /// up.
    fn find(
        &mut self,
        search: &Search<'_>,
        edge: Edge,
        target: u32,
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
            for next in search.group.graph.edges(node) {
                *budget = budget.saturating_sub(1);
                let reason = next.label.reason();
                let cost = u32::from(reason != Reason::Junction);
                let is_nearer =
                    self.round[next.to] != self.this_round || self.far[next.to] > far + cost;
                if !search.along.has(reason) || far + cost > limit || !is_nearer {
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
            format!("no later read of the list has this committed append ({txns})")
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
        | Phenomenon::G2Item
        | Phenomenon::ReadYourWrites
        | Phenomenon::MonotonicReads => {
            format!("each of {txns} must come before the next, and the last before the first")
        }
    }
}
