//! The regions of the cluster: a drawing in which distances are roughly proportional to round trips,
//! and a table of round trips.

use maud::{Markup, html};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::{Cluster, RegionId};

use super::text;
use crate::plane;

/// The largest number of regions that are drawn, and whose round trips are shown in a square table.
const REGIONS_MAX: usize = 24;
/// With many regions, only the links to so many neighbours of a region are drawn.
const NEAREST: usize = 2;

/// The smallest drawing. It is readable on the screen of a phone.
const SIZE: (f64, f64) = (440.0, 280.0);
/// Space between two labels.
const GAP: f64 = 10.0;
const PILL_HEIGHT: f64 = 40.0;
/// Width of one character of a name.
const CHARACTER: f64 = 8.4;
/// Characters of a name that are shown.
const NAME_MAX: usize = 16;
/// Width and height of the label of a link.
const LABEL: (f64, f64) = (56.0, 16.0);
/// Where on its link a label may be, the best first. In the middle, labels of crossing links would
/// often overlap.
const LABEL_AT: [f64; 9] = [0.5, 0.42, 0.58, 0.35, 0.65, 0.29, 0.71, 0.24, 0.76];
/// Where else it may be: so far beside the middle of its link.
const LABEL_BESIDE: [f64; 6] = [22.0, -22.0, 34.0, -34.0, 46.0, -46.0];

/// A rectangle, by its middle.
#[derive(Clone, Copy, PartialEq, Debug)]
struct Rect {
    x: f64,
    y: f64,
    width: f64,
    height: f64,
}

impl Rect {
    /// How far the boxes overlap, with the gap between them, in each direction; positive in both if
    /// they do.
    fn overlap(&self, other: &Self, gap: f64) -> (f64, f64) {
        let dx = (self.width + other.width) / 2.0 + gap - (self.x - other.x).abs();
        let dy = (self.height + other.height) / 2.0 + gap - (self.y - other.y).abs();
        (dx, dy)
    }

    fn overlaps(&self, other: &Self, gap: f64) -> bool {
        let (dx, dy) = self.overlap(other, gap);
        dx > 1e-6 && dy > 1e-6
    }

    fn is_within(&self, size: (f64, f64)) -> bool {
        let (right, bottom) = (self.x + self.width / 2.0, self.y + self.height / 2.0);
        self.left() >= -0.1 && self.top() >= -0.1 && right <= size.0 + 0.1 && bottom <= size.1 + 0.1
    }

    fn left(&self) -> f64 {
        self.x - self.width / 2.0
    }

    fn top(&self) -> f64 {
        self.y - self.height / 2.0
    }
}

/// A link between two regions, and the place of its label if there is room for it.
#[derive(Debug)]
struct Link {
    ends: (RegionId, RegionId),
    label: Option<Rect>,
}

/// The drawing of the regions. It depends on the topology only, so it is computed once.
#[derive(Debug)]
pub(super) struct RegionMap {
    size: (f64, f64),
    pills: Vec<Rect>,
    links: Vec<Link>,
}

/// What is known of a region now.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct RegionState {
    /// Nodes that this node can send to, itself included.
    pub(super) up: usize,
    pub(super) nodes: usize,
}

fn short(name: &str) -> String {
    match name.char_indices().nth(NAME_MAX) {
        Some((cut, _)) => format!("{}…", name.get(..cut).unwrap_or_default()),
        None => name.to_owned(),
    }
}

fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

impl RegionMap {
    /// None if there are too many regions.
    pub(super) fn new(cluster: &Cluster) -> Option<Self> {
        let map = &cluster.topology;
        if map.len() > REGIONS_MAX {
            return None;
        }
        let regions: Vec<RegionId> = map.regions().collect();
        let rtt = |a: usize, b: usize| match (regions.get(a), regions.get(b)) {
            (Some(a), Some(b)) => map.rtt(*a, *b).as_secs_f64(),
            _ => 0.0,
        };
        let places = plane::places(map.len(), rtt);
        let widths: Vec<f64> = regions
            .iter()
            .map(|region| {
                (short(map.name_of(*region)).chars().count() as f64 * CHARACTER + 18.0).max(64.0)
            })
            .collect();
        let (size, pills) = spread(&places, &widths);
        let links = labelled(&plane::links(&cluster.topology, NEAREST), &pills, size);
        Some(Self { size, pills, links })
    }

    fn pill(&self, region: RegionId) -> Option<&Rect> {
        self.pills.get(usize::from(region.0))
    }

    /// The drawing. `here` is the region of this node.
    pub(super) fn draw(
        &self,
        cluster: &Cluster,
        here: RegionId,
        states: &OrdMap<RegionId, RegionState>,
        rtt: impl Fn(RegionId, RegionId) -> Rtt,
    ) -> Markup {
        let map = &cluster.topology;
        let (width, height) = self.size;
        html! {
            svg class="map" viewBox={ "0 0 " (width) " " (height) } width=(width) height=(height)
                role="img" aria-label="Regions and the round trips between them" {
                @for Link { ends: (a, b), .. } in &self.links {
                    @if let (Some(from), Some(to)) = (self.pill(*a), self.pill(*b)) {
                        line class=[(*a == here || *b == here).then_some("here")]
                            x1=(rounded(from.x)) y1=(rounded(from.y)) x2=(rounded(to.x)) y2=(rounded(to.y)) {}
                    }
                }
                @for Link { ends: (a, b), label } in &self.links {
                    @if let Some(label) = label {
                        text class="rtt" text-anchor="middle" x=(rounded(label.x)) y=(rounded(label.y + 4.0)) {
                            (rtt(*a, *b).text()) " ms"
                        }
                    }
                }
                @for (region, pill) in map.regions().zip(&self.pills) {
                    @let state = states.get(&region).copied().unwrap_or_default();
                    g class={ (class_of(state)) @if region == here { " here" } } {
                        rect x=(rounded(pill.left())) y=(rounded(pill.top())) rx="9"
                            width=(rounded(pill.width)) height=(rounded(pill.height)) {}
                        text class="name" text-anchor="middle" x=(rounded(pill.x)) y=(rounded(pill.y - 2.0)) {
                            (short(map.name_of(region)))
                        }
                        text class="nodes" text-anchor="middle" x=(rounded(pill.x)) y=(rounded(pill.y + 13.0)) {
                            (state.up) "/" (state.nodes) " up"
                        }
                    }
                }
            }
        }
    }
}

fn class_of(state: RegionState) -> &'static str {
    match state {
        RegionState { up, nodes } if up == nodes => "all",
        RegionState { up: 0, .. } => "none",
        RegionState { .. } => "some",
    }
}

/// The places of the names, without overlaps, and the size of a drawing with room for them.
fn spread(places: &[(f64, f64)], widths: &[f64]) -> ((f64, f64), Vec<Rect>) {
    let widest = widths.iter().copied().fold(0.0, f64::max);
    let (mut width, mut height) = SIZE;
    let mut pills = Vec::new();
    // Each try has half more room than the one before it.
    for _ in 0..8 {
        let margin = (widest / 2.0 + 4.0, PILL_HEIGHT / 2.0 + 4.0);
        let fitted = plane::fitted(places, (width, height), margin);
        let pill =
            |((x, y), width): ((f64, f64), &f64)| Rect { x, y, width: *width, height: PILL_HEIGHT };
        pills = fitted.into_iter().zip(widths).map(pill).collect();
        if is_separated(&mut pills, (width, height)) {
            break;
        }
        (width, height) = (width * 1.22, height * 1.22);
    }
    ((width.round(), height.round()), pills)
}

/// Moves boxes away from each other, within the drawing. False if some still overlap.
fn is_separated(pills: &mut [Rect], size: (f64, f64)) -> bool {
    for _ in 0..200 {
        let mut has_moved = false;
        for at in 1..pills.len() {
            let (before, after) = pills.split_at_mut(at);
            let Some(one) = after.first_mut() else { continue };
            for other in before.iter_mut() {
                if other.overlaps(one, GAP) {
                    separate(one, other);
                    has_moved = true;
                }
            }
        }
        if !has_moved {
            return true;
        }
        for pill in pills.iter_mut() {
            pill.x = pill.x.clamp(pill.width / 2.0, size.0 - pill.width / 2.0);
            pill.y = pill.y.clamp(pill.height / 2.0, size.1 - pill.height / 2.0);
        }
    }
    false
}

/// Moves two boxes apart in the direction in which less is needed.
fn separate(one: &mut Rect, other: &mut Rect) {
    let (dx, dy) = one.overlap(other, GAP);
    let sign = |a: f64, b: f64| if a < b { -1.0 } else { 1.0 };
    if dx < dy {
        let step = sign(one.x, other.x) * (dx / 2.0 + 0.1);
        (one.x, other.x) = (one.x + step, other.x - step);
    } else {
        let step = sign(one.y, other.y) * (dy / 2.0 + 0.1);
        (one.y, other.y) = (one.y + step, other.y - step);
    }
}

/// The links with their labels. A label for which there is no room is left out; its number is in the
/// table.
fn labelled(pairs: &[(RegionId, RegionId)], pills: &[Rect], size: (f64, f64)) -> Vec<Link> {
    let mut taken = pills.to_vec();
    let pill = |region: RegionId| pills.get(usize::from(region.0)).copied();
    pairs
        .iter()
        .map(|&(a, b)| {
            let label = pill(a).zip(pill(b)).and_then(|(from, to)| {
                let is_free = |label: &Rect| {
                    label.is_within(size) && !taken.iter().any(|other| other.overlaps(label, 1.0))
                };
                label_places(from, to).find(is_free)
            });
            taken.extend(label);
            Link { ends: (a, b), label }
        })
        .collect()
}

/// Where the label of a link between these ends may be, the best place first.
fn label_places(from: Rect, to: Rect) -> impl Iterator<Item = Rect> {
    let (dx, dy) = (to.x - from.x, to.y - from.y);
    let length = dx.hypot(dy).max(1e-9);
    let (width, height) = LABEL;
    let on = LABEL_AT.into_iter().map(|part| (part, 0.0));
    let beside = LABEL_BESIDE.into_iter().map(|distance| (0.5, distance));
    on.chain(beside).map(move |(part, distance)| Rect {
        x: from.x + dx * part - dy / length * distance,
        y: from.y + dy * part + dx / length * distance,
        width,
        height,
    })
}

/// A round trip between two regions.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Rtt {
    pub(super) ms: f64,
    /// Whether this node measured it; otherwise it is the topology's.
    pub(super) is_measured: bool,
}

impl Rtt {
    fn text(&self) -> String {
        text::number(self.ms)
    }
}

/// The table of round trips. With many regions, only those from `here`.
pub(super) fn matrix(
    cluster: &Cluster,
    here: RegionId,
    rtt: impl Fn(RegionId, RegionId) -> Rtt,
) -> Markup {
    let map = &cluster.topology;
    let is_square = map.len() <= REGIONS_MAX;
    let columns: Vec<RegionId> = if is_square { map.regions().collect() } else { vec![here] };
    html! {
        div class="wide" { table class="matrix" {
            thead { tr {
                th { "ms" }
                @for to in &columns { th class="n" { (map.name_of(*to)) } }
            } }
            tbody { @for from in map.regions() {
                tr {
                    th { (map.name_of(from)) }
                    @for to in &columns {
                        @let cell = rtt(from, *to);
                        td class={ "n" @if !cell.is_measured { " soft" } } { (cell.text()) }
                    }
                }
            } }
        } }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use orthodrome_core::topology::Topology;

    use super::*;

    fn boxes(map: &RegionMap) -> Vec<Rect> {
        let labels = map.links.iter().filter_map(|link| link.label);
        map.pills.iter().copied().chain(labels).collect()
    }

    #[test]
    fn no_two_labels_overlap_and_all_are_within_the_drawing() {
        for topology in ["azure5", "azure6"].into_iter().filter_map(Topology::built_in) {
            let name = topology.name.clone();
            let regions = topology.len();
            let cluster = Cluster::spread(topology, 1, 1, 1, 1).unwrap();
            let map = RegionMap::new(&cluster).unwrap();
            assert_eq!(map.pills.len(), regions);
            let boxes = boxes(&map);
            for (at, one) in boxes.iter().enumerate() {
                for other in boxes.iter().skip(at + 1) {
                    assert!(!one.overlaps(other, 0.0), "{name}: {one:?} and {other:?}");
                }
                assert!(one.is_within(map.size), "{name}: {one:?} of {:?}", map.size);
            }
            let shown = map.links.iter().filter(|link| link.label.is_some()).count();
            let missing = map.links.len() - shown;
            assert!(regions > 5 || missing <= 1, "{name}: {missing} labels have no room");
        }
    }

    #[test]
    fn too_many_regions_are_not_drawn() {
        let topology = Topology::uniform(25, Duration::ZERO, Duration::from_millis(1));
        assert!(RegionMap::new(&Cluster::spread(topology, 1, 1, 1, 1).unwrap()).is_none());
    }

    #[test]
    fn names_are_cut_between_characters() {
        assert_eq!(short("us-east-1"), "us-east-1");
        assert_eq!(short(&"ü".repeat(20)), format!("{}…", "ü".repeat(NAME_MAX)));
    }
}
