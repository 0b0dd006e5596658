//! Drawings of topologies: places points in a plane, so that their distances are roughly proportional
//! to given ones, and chooses the links between them.

use orthodrome_core::RegionId;
use orthodrome_core::topology::Topology;

/// The largest number of regions for which all links are drawn.
const ALL_LINKS_UP_TO: usize = 8;

/// The number of rounds. The points of the largest built-in topologies do not move after half of
/// them.
const ROUNDS: usize = 300;

/// The places of points with these distances, by stress majorization. It starts from a circle, so
/// the same distances always give the same places.
#[must_use]
pub fn places(count: usize, distance: impl Fn(usize, usize) -> f64) -> Vec<(f64, f64)> {
    let turn = std::f64::consts::TAU / count.max(1) as f64;
    let mut places: Vec<(f64, f64)> = (0..count).map(|at| (turn * at as f64).sin_cos()).collect();
    for _ in 0..ROUNDS {
        let moved = places.iter().enumerate().map(|(a, &(x, y))| {
            let pulls = places.iter().enumerate().filter(|(b, _)| *b != a);
            let (sx, sy) = pulls.fold((0.0, 0.0), |(sx, sy), (b, &(ox, oy))| {
                let (dx, dy) = (x - ox, y - oy);
                let stretch = distance(a, b) / dx.hypot(dy).max(1e-9);
                (sx + ox + dx * stretch, sy + oy + dy * stretch)
            });
            let others = count.saturating_sub(1).max(1) as f64;
            (sx / others, sy / others)
        });
        places = moved.collect();
    }
    places
}

/// The places, scaled and moved so that they fill a drawing of this width and height, except for
/// its margin.
#[must_use]
pub fn fitted(places: &[(f64, f64)], size: (f64, f64), margin: (f64, f64)) -> Vec<(f64, f64)> {
    let range = |values: &dyn Fn(&(f64, f64)) -> f64| {
        let (low, high) = places
            .iter()
            .map(values)
            .fold((f64::MAX, f64::MIN), |(low, high), at| (low.min(at), high.max(at)));
        ((low + high) / 2.0, (high - low).max(1e-9))
    };
    let ((mx, wide), (my, tall)) = (range(&|place| place.0), range(&|place| place.1));
    let scale = ((size.0 - 2.0 * margin.0) / wide).min((size.1 - 2.0 * margin.1) / tall);
    let fit =
        |&(x, y): &(f64, f64)| (size.0 / 2.0 + (x - mx) * scale, size.1 / 2.0 + (y - my) * scale);
    places.iter().map(fit).collect()
}

/// The links to draw, each once: all of them, or, with many regions, those to the `nearest` neighbours
/// of a region.
#[must_use]
pub fn links(topology: &Topology, nearest: usize) -> Vec<(RegionId, RegionId)> {
    let is_near = |from: RegionId, to: RegionId| {
        let is_closer = |other: &RegionId| {
            *other != from && topology.rtt(from, *other) < topology.rtt(from, to)
        };
        topology.regions().filter(is_closer).count() < nearest
    };
    let is_drawn = |a, b| topology.len() <= ALL_LINKS_UP_TO || is_near(a, b) || is_near(b, a);
    let all = topology.regions().flat_map(|a| topology.regions().map(move |b| (a, b)));
    all.filter(|&(a, b)| a < b && is_drawn(a, b)).collect()
}
