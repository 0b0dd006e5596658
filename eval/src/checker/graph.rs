//! The graph of the order that the history forces, and its strongly connected components.
//!
//! Nodes below the number of attempts are attempts. The other nodes are *junctions*: they stand for
//! no transaction, and keep the graph linear where each of many attempts must precede each of many
//! others. An edge into a junction has the reason; edges out of a junction have
//! [`Reason::Junction`] and cost nothing. So a path through junctions counts as the one edge that
//! it stands for.

use orthodrome_core::ordered::{OrdMap, OrdSet};

use crate::history::KeyId;
use crate::history::dense::Dense;

/// Why one node precedes another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Reason {
    /// It wrote the previous version.
    Ww,
    /// It wrote the version that the other read.
    Wr,
    /// It read the version before the one that the other wrote.
    Rw,
    /// It completed before its own client invoked the other.
    Process,
    /// It completed before the other was invoked.
    RealTime,
    /// The reason is that of the edge into the junction.
    Junction,
}

/// A set of reasons.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Reasons(u8);

impl Reasons {
    /// No reason but junctions, which every path may pass.
    pub(super) const NONE: Self = Self(1 << Reason::Junction as u8);
    /// Every reason.
    pub(super) const ALL: Self = Self(u8::MAX);

    /// This set and one more reason.
    pub(super) const fn with(self, reason: Reason) -> Self {
        Self(self.0 | 1 << reason as u8)
    }

    /// The union of two sets.
    pub(super) const fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// True if the reason is in the set.
    pub(super) const fn has(self, reason: Reason) -> bool {
        self.0 & (1 << reason as u8) != 0
    }
}

/// A reason and, for the first three, the key it concerns; in 32 bits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Label(u32);

impl Label {
    pub(super) const JUNCTION: Self = Self::new(Reason::Junction, 0);

    /// `key` is below 2^29; [`crate::history::History`] keeps it below 2^28.
    pub(super) const fn new(reason: Reason, key: KeyId) -> Self {
        Self((key << 3) | reason as u32)
    }

    pub(super) const fn reason(self) -> Reason {
        match self.0 & 7 {
            0 => Reason::Ww,
            1 => Reason::Wr,
            2 => Reason::Rw,
            3 => Reason::Process,
            4 => Reason::RealTime,
            _ => Reason::Junction,
        }
    }

    pub(super) const fn key(self) -> KeyId {
        self.0 >> 3
    }
}

/// One edge, seen from where it starts.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Edge {
    pub(super) to: u32,
    pub(super) label: Label,
}

/// Collects edges.
#[derive(Debug)]
pub(super) struct Builder {
    nodes: u32,
    edges: Vec<(u32, Edge)>,
    /// Attempts outside the graph.
    apart: OrdSet<u32>,
    /// Edges to and from those attempts.
    aside: Vec<(u32, Edge)>,
}

impl Builder {
    /// A graph of `attempts` attempts without edges.
    pub(super) fn new(attempts: u32) -> Self {
        Self { nodes: attempts, edges: Vec::new(), apart: OrdSet::new(), aside: Vec::new() }
    }

    /// The same, with some attempts outside the graph. Their edges are stored separately, because
    /// each of them is judged by itself.
    pub(super) fn with_apart(attempts: u32, apart: OrdSet<u32>) -> Self {
        Self { apart, ..Self::new(attempts) }
    }

    /// A new junction.
    pub(super) fn junction(&mut self) -> u32 {
        self.nodes += 1;
        self.nodes - 1
    }

    /// Adds an edge. An attempt never precedes itself; callers leave such edges out.
    pub(super) fn edge(&mut self, from: u32, to: u32, label: Label) {
        assert!(from != to, "node {from} would precede itself");
        let is_apart = self.apart.contains(&from) || self.apart.contains(&to);
        let edges = if is_apart { &mut self.aside } else { &mut self.edges };
        edges.push((from, Edge { to, label }));
    }

    /// The graph, its edges sorted by where they start and otherwise in the order of addition.
    pub(super) fn build(self) -> Graph {
        let mut starts = Dense::filled(0_u32, self.nodes + 1);
        for (from, _) in &self.edges {
            starts[from + 1] += 1;
        }
        for node in 0..self.nodes {
            starts[node + 1] += starts[node];
        }
        let mut next = starts.clone();
        let nothing = Edge { to: 0, label: Label::JUNCTION };
        let mut edges = Dense::filled(nothing, self.edges.len() as u32);
        for (from, edge) in self.edges {
            edges[next[from]] = edge;
            next[from] += 1;
        }
        Graph { starts, edges, apart: self.apart, aside: self.aside }
    }
}

/// A graph whose edges lie side by side in memory.
#[derive(Debug)]
pub(super) struct Graph {
    starts: Dense<u32>,
    edges: Dense<Edge>,
    apart: OrdSet<u32>,
    aside: Vec<(u32, Edge)>,
}

impl Graph {
    /// The number of nodes.
    pub(super) fn len(&self) -> u32 {
        self.starts.len() - 1
    }

    /// The edges that start at a node.
    pub(super) fn edges(&self, node: u32) -> &[Edge] {
        self.edges.slice(self.starts[node]..self.starts[node + 1])
    }

    /// Each attempt outside the graph, with the edges that lead to it (by where they start) and the
    /// edges that start at it.
    pub(super) fn apart(&self) -> OrdMap<u32, Aside> {
        let mut apart: OrdMap<u32, Aside> = OrdMap::new();
        for &(from, edge) in &self.aside {
            match (self.apart.contains(&from), self.apart.contains(&edge.to)) {
                (true, false) => apart.entry(from).or_default().after.push(edge),
                (false, true) => apart.entry(edge.to).or_default().before.push((from, edge.label)),
                // None of them writes, so none depends on another.
                (true, true) | (false, false) => {}
            }
        }
        apart
    }

    /// The strongly connected components by edges of these reasons (Tarjan 1972, without
    /// recursion): for each node its component, and for each component its size. The number of a
    /// component is greater than those of the components it leads to.
    pub(super) fn components(&self, reasons: Reasons) -> Components {
        let mut search = Search {
            graph: self,
            reasons,
            order: Dense::filled(0, self.len()),
            low: Dense::filled(0, self.len()),
            visited: 0,
            open: Vec::new(),
            path: Vec::new(),
            found: Components { of: Dense::filled(NONE, self.len()), sizes: Dense::default() },
        };
        for root in 0..self.len() {
            if search.order[root] == 0 {
                search.explore(root);
            }
        }
        search.found
    }
}

/// Edges of an attempt outside the graph.
#[derive(Debug, Default)]
pub(super) struct Aside {
    pub(super) before: Vec<(u32, Label)>,
    pub(super) after: Vec<Edge>,
}

const NONE: u32 = u32::MAX;

/// A partition of the nodes into strongly connected components.
#[derive(Debug)]
pub(super) struct Components {
    pub(super) of: Dense<u32>,
    pub(super) sizes: Dense<u32>,
}

impl Components {
    /// True if an edge between the nodes lies on a cycle.
    pub(super) fn are_together(&self, a: u32, b: u32) -> bool {
        self.of[a] == self.of[b]
    }

    /// The nodes of every component that has more than one, ordered by their first nodes.
    pub(super) fn cyclic(&self) -> Vec<Vec<u32>> {
        let mut place = Dense::filled(NONE, self.sizes.len());
        let mut groups: Dense<Vec<u32>> = Dense::default();
        for node in self.of.ids() {
            let component = self.of[node];
            if self.sizes[component] < 2 {
                continue;
            }
            if place[component] == NONE {
                place[component] = groups.push(Vec::new());
            }
            groups[place[component]].push(node);
        }
        groups.rows().to_vec()
    }
}

struct Search<'g> {
    graph: &'g Graph,
    reasons: Reasons,
    /// When each node was first visited, from 1.
    order: Dense<u32>,
    /// The earliest visited node known to be reachable, as far as Tarjan needs it.
    low: Dense<u32>,
    visited: u32,
    /// Nodes whose component is not complete.
    open: Vec<u32>,
    /// The nodes from the root to here, each with how many of its edges are done.
    path: Vec<(u32, u32)>,
    found: Components,
}

impl Search<'_> {
    fn explore(&mut self, root: u32) {
        self.enter(root);
        while let Some((node, done)) = self.path.last_mut() {
            let node = *node;
            let Some(edge) = self.graph.edges(node).get(*done as usize) else {
                self.leave(node);
                continue;
            };
            *done += 1;
            if !self.reasons.has(edge.label.reason()) {
                continue;
            }
            if self.order[edge.to] == 0 {
                self.enter(edge.to);
            } else if self.found.of[edge.to] == NONE {
                self.low[node] = self.low[node].min(self.order[edge.to]);
            }
        }
    }

    fn enter(&mut self, node: u32) {
        self.visited += 1;
        self.order[node] = self.visited;
        self.low[node] = self.visited;
        self.open.push(node);
        self.path.push((node, 0));
    }

    fn leave(&mut self, node: u32) {
        self.path.pop();
        if let Some(&(parent, _)) = self.path.last() {
            self.low[parent] = self.low[parent].min(self.low[node]);
        }
        if self.low[node] != self.order[node] {
            return;
        }
        let component = self.found.sizes.push(0);
        while let Some(member) = self.open.pop() {
            self.found.of[member] = component;
            self.found.sizes[component] += 1;
            if member == node {
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_hold_reason_and_key() {
        use Reason::{Junction, Process, RealTime, Rw, Wr, Ww};
        for reason in [Ww, Wr, Rw, Process, RealTime, Junction] {
            let label = Label::new(reason, (1 << 28) - 1);
            assert_eq!((label.reason(), label.key()), (reason, (1 << 28) - 1));
            assert!(Reasons::ALL.has(reason));
            assert_eq!(Reasons::NONE.has(reason), reason == Junction);
            assert!(Reasons::NONE.with(reason).has(reason));
        }
    }

    /// Components must agree with mutual reachability, found the slow way, under any set of
    /// reasons.
    #[test]
    fn components_are_mutual_reachability() {
        let mut rng = orthodrome_core::rng::Rng::stream(1, "components", 0);
        for _ in 0..2_000 {
            let nodes = 1 + rng.below(8) as u32;
            let mut builder = Builder::new(nodes);
            let mut reach = vec![vec![false; 8]; 8];
            for _ in 0..rng.below(16) {
                let (from, to) = (rng.below(nodes.into()) as u32, rng.below(nodes.into()) as u32);
                let reason = if rng.chance(2, 3) { Reason::Ww } else { Reason::Rw };
                if from != to {
                    builder.edge(from, to, Label::new(reason, 0));
                    reach[from as usize][to as usize] |= reason == Reason::Ww;
                }
            }
            for via in 0..8 {
                for from in 0..8 {
                    for to in 0..8 {
                        reach[from][to] |= reach[from][via] && reach[via][to];
                    }
                }
            }
            let components = builder.build().components(Reasons::NONE.with(Reason::Ww));
            for a in 0..nodes {
                for b in 0..nodes {
                    let (i, j) = (a as usize, b as usize);
                    let together = a == b || (reach[i][j] && reach[j][i]);
                    assert_eq!(components.are_together(a, b), together);
                    if reach[i][j] {
                        assert!(components.of[a] >= components.of[b]);
                    }
                }
            }
            let cyclic: usize = components.cyclic().iter().map(Vec::len).sum();
            let expected = (0..nodes)
                .filter(|a| (0..nodes).any(|b| b != *a && components.are_together(*a, b)));
            assert_eq!(cyclic, expected.count());
        }
    }
}
