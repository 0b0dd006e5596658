//! One round of gossip of a region of Ocean Vista: every server reports, the gossiper merges.
//! `cargo bench -p orthodrome-protocols --bench watermarks`
//!
//! The cost follows servers and partitions. `in_flight` varies how many transactions are in their
//! S-phase on every server, and hence what each report stands for: a report is as large with a
//! million as with none, and finding the least of them and merging is all there is to do. What
//! beginning and ending one transaction costs a server's `Tids`, `begin_and_store` shows.
#![allow(
    clippy::unwrap_used,
    missing_docs,
    reason = "a benchmark: a failed assumption should stop it"
)]

use std::hint::black_box;
use std::sync::Arc;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::id::{PartitionId, RegionId};
use orthodrome_core::ordered::OrdMap;
use orthodrome_core::time::{Duration, Timestamp};
use orthodrome_core::topology::Topology;
use orthodrome_protocols::ocean_vista::Tids;
use orthodrome_protocols::ocean_vista::gossiper::{Gossiper, Heard, Regional};
use orthodrome_protocols::ocean_vista::watermark::{Member, Members, Report, Status};

/// The version numbers of server `slot` with so many transactions in their S-phase.
fn tids(slot: u64, in_flight: u64) -> Tids {
    let mut tids = Tids::new(slot, Timestamp::ZERO);
    tids.raise(Timestamp::MAX);
    for _ in 0..in_flight {
        tids.begin(Timestamp::ZERO).unwrap();
    }
    tids
}

/// The oldest transaction ends its S-phase, and a new one begins.
fn begin_and_store(tids: &mut Tids) {
    tids.begin(Timestamp::ZERO).unwrap();
    tids.stored(tids.least_storing().unwrap());
}

/// A gossiper of one of three regions, and what each server of its region has under way.
struct Region {
    gossiper: Gossiper,
    in_flight: Vec<Tids>,
    members: Members,
    round: u64,
    partitions: u32,
}

impl Region {
    fn new(servers: u32, partitions: u32, in_flight: u64) -> Self {
        let map = Topology::uniform(3, Duration::from_micros(500), Duration::from_millis(100));
        let cluster = Arc::new(Cluster::spread(map, servers, 0, partitions, 3).unwrap());
        let active = Member { incarnation: 1, disk: 0, status: Status::Active };
        let all = cluster.servers().map(|server| (server.id, active)).collect();
        let members = Members { epoch: 2, servers: all };
        let gossiper = Gossiper::new(cluster, RegionId(0), members.clone());
        let in_flight = (0..servers).map(|slot| tids(u64::from(slot), in_flight)).collect();
        Self { gossiper, in_flight, members, round: 0, partitions }
    }

    /// Each server's oldest transaction is stored and a new one begins; all report; the other
    /// regions are heard; the gossiper merges.
    fn round(&mut self) {
        self.round += 1;
        let new = Timestamp((1 << 40) + self.round * 4_096);
        for ((server, incarnation), tids) in self.members.active().zip(&mut self.in_flight) {
            begin_and_store(tids);
            let svw = tids.svw(Timestamp::ZERO);
            let srw = OrdMap::from([(PartitionId(server.0 % self.partitions), Timestamp(1))]);
            let epoch = self.members.epoch;
            let report = Report { server, incarnation, epoch, svw, srw, sgw: Timestamp(1) };
            black_box(self.gossiper.on_report(report));
        }
        for region in [1, 2].map(RegionId) {
            let (epoch, dvw, dgw) = (self.members.epoch, new, new);
            let drw = OrdMap::from([(PartitionId(0), Timestamp(self.round))]);
            let heard = self.gossiper.on_regional(Regional { region, epoch, dvw, drw, dgw });
            assert_eq!(heard, Heard::Taken);
        }
        black_box(self.gossiper.merge());
    }
}

#[divan::bench(args = [0, 1_000, 100_000, 1_000_000])]
fn in_flight(bencher: divan::Bencher<'_, '_>, count: u64) {
    let mut region = Region::new(5, 15, count.max(1));
    bencher.bench_local(|| region.round());
}

#[divan::bench(name = "begin_and_store", args = [1, 1_000, 100_000, 1_000_000])]
fn one_transaction(bencher: divan::Bencher<'_, '_>, count: u64) {
    let mut tids = tids(0, count);
    bencher.bench_local(|| begin_and_store(&mut tids));
}

#[divan::bench(args = [1, 5, 25])]
fn servers_per_region(bencher: divan::Bencher<'_, '_>, count: u32) {
    let mut region = Region::new(count, 15, 1_000);
    bencher.bench_local(|| region.round());
}

#[divan::bench(args = [3, 30, 300])]
fn partitions(bencher: divan::Bencher<'_, '_>, count: u32) {
    let mut region = Region::new(5, count, 1_000);
    bencher.bench_local(|| region.round());
}

fn main() {
    divan::main();
}
