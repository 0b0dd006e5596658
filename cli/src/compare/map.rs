//! A drawing of a topology. Regions are placed so that distances are roughly proportional to
//! round-trip times.

use maud::{Markup, html};
use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::RegionId;
use orthodrome_server::plane;

/// Width and height.
const SIZE: (f64, f64) = (640.0, 460.0);
const MARGIN: f64 = 70.0;
/// With many regions, only the links to so many neighbours of a region are drawn.
const NEAREST: usize = 3;

/// The positions of the regions.
pub struct Layout {
    places: Vec<(f64, f64)>,
}

impl Layout {
    /// Places the regions of `cluster`. The same topology always gives the same drawing.
    pub fn new(cluster: &Cluster) -> Self {
        let map = &cluster.topology;
        let count = map.len();
        let rtt = |a: usize, b: usize| {
            let id = |at: usize| RegionId(u16::try_from(at).unwrap_or(u16::MAX));
            map.rtt(id(a), id(b)).as_secs_f64()
        };
        Self { places: plane::fitted(&plane::places(count, rtt), SIZE, (MARGIN, MARGIN)) }
    }

    /// The position of a region.
    pub fn place(&self, region: RegionId) -> (f64, f64) {
        let center = (SIZE.0 / 2.0, SIZE.1 / 2.0);
        self.places.get(usize::from(region.0)).copied().unwrap_or(center)
    }

    /// The drawing, with `over` on top of it.
    pub fn draw(&self, cluster: &Cluster, id: &str, over: &Markup) -> Markup {
        let map = &cluster.topology;
        let (width, height) = SIZE;
        html! {
            svg class="map" id=(id) viewBox={ "0 0 " (width) " " (height) } width=(width) height=(height)
                role="img" aria-label={ "Regions of " (map.name) " and the round-trip times between them" } {
                @for (a, b) in plane::links(&cluster.topology, NEAREST) {
                    @let ((ax, ay), (bx, by)) = (self.place(a), self.place(b));
                    line x1=(rounded(ax)) y1=(rounded(ay)) x2=(rounded(bx)) y2=(rounded(by)) {}
                }
                @for (a, b) in plane::links(&cluster.topology, NEAREST) {
                    @let ((ax, ay), (bx, by)) = (self.place(a), self.place(b));
                    // The label is nearer to one end, because in the middle the labels of crossing
                    // links would overlap.
                    text class="rtt" text-anchor="middle" x=(rounded(ax * 0.58 + bx * 0.42))
                        y=(rounded(ay * 0.58 + by * 0.42 + 4.0)) {
                        (rounded(map.rtt(a, b).as_secs_f64() * 1e3))
                    }
                }
                @for region in map.regions() {
                    @let (x, y) = self.place(region);
                    circle class="place" cx=(rounded(x)) cy=(rounded(y)) r="26" {}
                    text class="name" text-anchor="middle" x=(rounded(x)) y=(rounded(y + 5.0)) {
                        (map.name_of(region))
                    }
                    text class="leads" text-anchor="middle" x=(rounded(x)) y=(rounded(y + 40.0)) {
                        (led(cluster, region))
                    }
                }
                (over)
            }
        }
    }
}

/// The partitions that a region leads, abbreviated.
fn led(cluster: &Cluster, region: RegionId) -> String {
    let in_region = |node| cluster.region_of(node) == region;
    let led: Vec<String> = cluster
        .partitions()
        .filter(|partition| in_region(partition.preferred_leader))
        .map(|partition| partition.id.to_string())
        .collect();
    match led.as_slice() {
        [] => String::new(),
        all if all.len() <= 4 => format!("leads {}", all.join(" ")),
        all => format!("leads {} partitions", all.len()),
    }
}

/// A coordinate rounded to one decimal.
pub fn rounded(value: f64) -> f64 {
    (value * 10.0).round() / 10.0
}

#[cfg(test)]
mod tests {
    use super::*;
    use orthodrome_core::topology::Topology;

    #[test]
    fn distances_are_about_the_round_trips() {
        let map = Topology::built_in("azure5").unwrap();
        let cluster = Cluster::spread(map.clone(), 1, 1, 5, 3).unwrap();
        let layout = Layout::new(&cluster);
        let distance = |a, b| {
            let ((ax, ay), (bx, by)) = (layout.place(a), layout.place(b));
            (ax - bx).hypot(ay - by)
        };
        // Pixels for each millisecond on each link. They are similar, because these five regions
        // fit well into a plane.
        let scales: Vec<f64> = plane::links(&cluster.topology, NEAREST)
            .into_iter()
            .map(|(a, b)| distance(a, b) / (map.rtt(a, b).as_secs_f64() * 1e3))
            .collect();
        assert_eq!(scales.len(), 10);
        let mean = scales.iter().sum::<f64>() / scales.len() as f64;
        for scale in &scales {
            assert!((scale / mean - 1.0).abs() < 0.5, "{scales:?}");
        }
        for region in map.regions() {
            let (x, y) = layout.place(region);
            assert!((0.0..SIZE.0).contains(&x) && (0.0..SIZE.1).contains(&y), "{region} {x} {y}");
        }
    }

    #[test]
    fn a_map_of_one_region_and_one_of_many_can_be_drawn() {
        for count in [1, 2, 30] {
            let map = Topology::uniform(
                count,
                std::time::Duration::from_millis(1),
                std::time::Duration::from_millis(80),
            );
            let cluster = Cluster::spread(map, 1, 1, 3, 1).unwrap();
            let drawn = Layout::new(&cluster).draw(&cluster, "map", &html! {}).into_string();
            assert_eq!(drawn.matches("<circle").count(), usize::from(count));
            assert!(!drawn.contains("NaN"), "{drawn}");
        }
    }
}
