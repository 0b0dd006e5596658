//! TPC-C and MovR: mixes, shares, placement of data; and each check notices the violation that it
//! exists for.

use orthodrome_core::cluster::Cluster;
use orthodrome_core::procedure::movr::{Course, Ride, Rider};
use orthodrome_core::procedure::tpcc::{
    Customer, District, Order, Queue, Stock, Warehouse, customer_key, district_key, key_numbers,
    last_order_key, order_key, queue_key, warehouse_key,
};
use orthodrome_core::topology::Topology;

use super::super::tpcc_check::State;
use super::*;

/// The state at the end of a run, read by the workload's final requests.
fn left(workload: &dyn Workload, serial: &Serial) -> Reads {
    workload.final_requests().iter().flat_map(|request| serial.read(&request.reads)).collect()
}

fn azure6() -> Cluster {
    Cluster::spread(Topology::built_in("azure6").unwrap(), 1, 1, 12, 3).unwrap()
}

/// The regions that lead the keys which a request declares, its own region first.
fn regions(cluster: &Cluster, home: RegionId, request: &Request) -> OrdSet<RegionId> {
    let keys = request.reads.iter().chain(&request.writes);
    let leaders = keys.map(|key| cluster.leader_region(cluster.partition_of(key)));
    leaders.chain([home]).collect()
}

/// The warehouses of a request's keys.
fn warehouses(request: &Request) -> OrdSet<i64> {
    let keys = request.reads.iter().chain(&request.writes);
    keys.map(|key| key_numbers(key).unwrap()[0]).collect()
}

#[test]
fn tpcc_has_the_mix_and_the_shares_of_the_specification() {
    let requests = run("tpcc", &Options::default(), 20_000).1;
    let mix = [
        ("new-order", 45.0),
        ("payment", 43.0),
        ("order-status", 4.0),
        ("delivery", 4.0),
        ("stock-level", 4.0),
    ];
    assert_mix(&requests, &mix);
    let of = |name: &str| -> Vec<&(Request, bool)> {
        requests.iter().filter(|(request, _)| request.name == name).collect()
    };
    let share =
        |some: &[&(Request, bool)], what, expected, holds: &dyn Fn(&Request, bool) -> bool| {
            let count = some.iter().filter(|(request, done)| holds(request, *done)).count();
            assert_share(count as f64, some.len() as f64, expected, what);
        };
    let orders = of("new-order");
    share(&orders, "rolled back", 0.01, &|_, is_committed| !is_committed);
    // 1 - 0.99^n over n from 5 to 15.
    let remote = (5..=15).map(|n| 1.0 - 0.99_f64.powi(n)).sum::<f64>() / 11.0;
    share(&orders, "of several warehouses", remote, &|request, _| warehouses(request).len() > 1);
    let lines = orders.iter().map(|(request, _)| request.reads.len() - 4);
    assert_eq!((lines.clone().min(), lines.max()), (Some(5), Some(15)));
    let payments = of("payment");
    share(&payments, "remote payments", 0.15, &|request, _| warehouses(request).len() > 1);
    let by_name = |request: &Request, _| request.reads.len() > 3;
    let count = payments.iter().filter(|(request, done)| by_name(request, *done)).count();
    let share = count as f64 / payments.len() as f64;
    // 60 % are by name, of whom 0.398 have a name that others have too.
    assert!((0.21..0.27).contains(&share), "{share} of the payments look at several customers");
    assert!(of("delivery").iter().all(|(request, done)| *done && request.reads.len() == 10));
}

#[test]
fn customers_and_items_are_drawn_unevenly() {
    let requests = run("tpcc:new-order", &Options::default(), 5_000).1;
    let mut items = OrdMap::<i64, u32>::new();
    for (request, _) in &requests {
        for key in request.reads.iter().filter(|key| key.bytes().starts_with(b"stock")) {
            *items.entry(key_numbers(key).unwrap()[1]).or_default() += 1;
        }
    }
    let total: u32 = items.values().sum();
    let mut counts: Vec<u32> = items.into_values().collect();
    counts.sort_unstable_by(|a, b| b.cmp(a));
    // Of 100 000 equally likely items, the 5 000 most popular of 50 000 draws would have about 15
    // %.
    let head: u32 = counts.iter().take(5_000).sum();
    assert!(f64::from(head) > 0.3 * f64::from(total), "{head} of {total}");
}

#[test]
fn orders_reach_other_regions_as_often_as_asked() {
    let cluster = azure6();
    let options = Options {
        multi_warehouse: Some(0.2),
        multi_region: Some(0.5),
        rollbacks: Some(0.0),
        ..Options::default()
    };
    let mut workload = parse("tpcc:new-order", &options).unwrap();
    workload.place(&cluster);
    let mut rng = Rng::stream(5, "workload", 0);
    let (mut several, mut abroad, count) = (0, 0, 6_000);
    for number in 0..count {
        let region = RegionId(number % 6);
        let request = workload.next(Issuer { region, ..issuer(0) }, &mut rng);
        let is_abroad = regions(&cluster, region, &request).len() > 1;
        several += u32::from(warehouses(&request).len() > 1);
        abroad += u32::from(is_abroad);
        assert!(!is_abroad || warehouses(&request).len() == 2);
    }
    assert_share(several.into(), count.into(), 0.2, "of several warehouses");
    assert_share(abroad.into(), several.into(), 0.5, "of several regions");
}

#[test]
fn distributed_transactions_have_two_regions_wherever_they_begin() {
    let cluster = azure6();
    for spec in ["tpcc:new-order", "tpcc:payment"] {
        let options = Options { distributed: Some(0.3), ..Options::default() };
        let mut workload = parse(spec, &options).unwrap();
        workload.place(&cluster);
        assert!(!workload.is_general());
        assert_eq!(workload.name(), spec);
        let mut rng = Rng::stream(5, "workload", 0);
        let (mut distributed, mut elsewhere, count) = (0, 0, 6_000);
        for _ in 0..count {
            let request = workload.next(issuer(0), &mut rng);
            let regions = regions(&cluster, RegionId(0), &request);
            let owners: OrdSet<RegionId> = request
                .reads
                .iter()
                .map(|key| cluster.leader_region(cluster.partition_of(key)))
                .collect();
            assert!(owners.len() <= 2, "{owners:?}");
            distributed += u32::from(owners.len() > 1);
            elsewhere += u32::from(!owners.contains(&RegionId(0)));
            assert!(regions.is_superset(&owners));
        }
        assert_share(distributed.into(), count.into(), 0.3, "of two regions");
        // A sixth of the warehouses is in this region, and some orders in other regions take from
        // here.
        let elsewhere = f64::from(elsewhere) / f64::from(count);
        assert!((0.75..0.82).contains(&elsewhere), "{elsewhere} have nothing to do with r0");
    }
}

#[test]
fn rides_are_taken_abroad_as_often_as_asked() {
    let cluster = azure6();
    let options = Options { multi_region: Some(0.3), ..Options::default() };
    let mut workload = parse("movr:begin-ride", &options).unwrap();
    workload.place(&cluster);
    let mut rng = Rng::stream(5, "workload", 0);
    let mut counts = [0_u32; 3];
    for number in 0..6_000 {
        let home = RegionId(number % 6);
        let request = workload.next(Issuer { region: home, ..issuer(0) }, &mut rng);
        let reach = regions(&cluster, home, &request).into_iter();
        let reach = reach.map(|region| Reach::between(&cluster, home, region)).max().unwrap();
        counts[reach as usize] += 1;
    }
    for (count, share) in counts.into_iter().zip([0.7, 0.2, 0.1]) {
        assert_share(count.into(), 6_000.0, share, "rides");
    }
}

#[test]
fn movr_has_the_mix_of_its_generator() {
    let requests = run("movr", &Options::default(), 20_000).1;
    let count = requests.iter().filter(|(request, _)| request.name == "read-vehicles").count();
    // A client with no ride to update or to end reads too.
    assert!((19_000..=19_600).contains(&count), "{count}");
    let options = Options { read_only: Some(0.0), ..Options::default() };
    let requests = run("movr", &options, 20_000).1;
    for (name, share) in [
        ("update-rides", 0.5),
        ("begin-ride", 0.2),
        ("add-user", 0.15),
        ("create-promo-code", 0.015),
    ] {
        let count = requests.iter().filter(|(request, _)| request.name == name).count() as f64;
        let near = (count / 20_000.0 - share).abs() < 0.02;
        assert!(near, "{name}: {count}");
    }
    for name in ["end-ride", "add-vehicle", "apply-promo-code"] {
        assert!(requests.iter().any(|(request, done)| request.name == name && *done), "{name}");
    }
}

#[test]
fn lost_writes_are_noticed() {
    for (spec, every) in [("tpcc", 100), ("tpcc:new-order", 100), ("movr:begin-ride", 40)] {
        let options = match spec {
            "movr:begin-ride" => {
                Options { vehicles: Some(600), users: Some(90_000), ..Options::default() }
            }
            _ => Options { warehouses: Some(2), ..Options::default() },
        };
        let mut serial = Serial { loses_every: Some(every), ..Serial::default() };
        let mut workload = parse(spec, &options).unwrap();
        let result = serial.run_many(workload.as_mut(), 2_000);
        assert!(result.is_err(), "{spec}: nobody noticed that every {every}th write was lost");
    }
}

/// A run of TPC-C, its final state, and a warehouse whose rows are complete.
fn tpcc_state() -> (Box<dyn Workload>, Reads, i64) {
    let mut workload =
        parse("tpcc", &Options { warehouses: Some(1), ..Options::default() }).unwrap();
    let mut serial = Serial::default();
    serial.run_many(workload.as_mut(), 2_500).unwrap();
    let state = left(workload.as_ref(), &serial);
    (workload, state, 0)
}

/// Applies `change` to the first row of `table` that it changes, and stores the result.
fn break_row(
    state: &mut Reads,
    table: &str,
    change: impl Fn(&Key, Option<&Value>) -> Option<Value>,
) {
    let prefix = format!("{table}{{");
    for (key, read) in
        state.iter_mut().filter(|(key, _)| key.bytes().starts_with(prefix.as_bytes()))
    {
        if let Some(value) = change(key, read.value.as_ref()) {
            read.value = Some(value);
            return;
        }
    }
    panic!("no row of {table} was changed");
}

fn set(state: &mut Reads, key: &Key, value: Value) {
    state.get_mut(key).unwrap().value = Some(value);
}

fn value<'a>(state: &'a Reads, key: &Key) -> Option<&'a Value> {
    state[key].value.as_ref()
}

/// An order that some client placed and that is not delivered, with its district.
fn waiting(state: &Reads, w: i64) -> (i64, Queue, Key, Order) {
    for d in 1..=10 {
        let queue = Queue::parse(value(state, &queue_key(w, d))).unwrap();
        if queue.orders.len() > 3 {
            let number = queue.orders[1].1;
            let key = order_key(w, d, number);
            let order = Order::parse(value(state, &key), w, d, number).unwrap();
            return (d, queue, key, order);
        }
    }
    panic!("every order is delivered");
}

type Break = fn(&mut Reads, i64);

#[test]
fn every_consistency_condition_of_tpcc_fails_where_it_is_broken() {
    let (workload, state, w) = tpcc_state();
    workload.audit_end(&state).unwrap();
    let cases: [(&str, Break); 15] = [
        ("condition 1 ", |state, w| {
            let mut row = Warehouse::parse(value(state, &warehouse_key(w))).unwrap();
            row.ytd += 1;
            set(state, &warehouse_key(w), row.value());
        }),
        ("condition 2 ", |state, w| {
            let (d, ..) = waiting(state, w);
            let mut row = District::parse(value(state, &district_key(w, d))).unwrap();
            row.next += 1;
            set(state, &district_key(w, d), row.value());
        }),
        ("condition 2 ", |state, w| {
            // An order that was placed is missing.
            let (_, _, key, _) = waiting(state, w);
            state.get_mut(&key).unwrap().value = None;
        }),
        ("condition 3 ", |state, w| {
            let (d, mut queue, ..) = waiting(state, w);
            queue.orders.remove(1);
            set(state, &queue_key(w, d), queue.value());
        }),
        ("condition 5 ", |state, w| {
            let (_, _, key, mut order) = waiting(state, w);
            order.carrier = 3;
            order.lines.iter_mut().for_each(|line| line.delivered = 1);
            set(state, &key, order.value());
        }),
        ("condition 6 ", |state, w| {
            let (_, _, key, mut order) = waiting(state, w);
            order.lines.pop();
            set(state, &key, order.value());
        }),
        ("condition 7 ", |state, w| {
            let (_, _, key, mut order) = waiting(state, w);
            order.lines[0].delivered = 1;
            set(state, &key, order.value());
        }),
        ("condition 8 ", |state, w| {
            let mut row = Warehouse::parse(value(state, &warehouse_key(w))).unwrap();
            let mut district = District::parse(value(state, &district_key(w, 1))).unwrap();
            (row.ytd, district.ytd) = (row.ytd + 1, district.ytd + 1);
            set(state, &warehouse_key(w), row.value());
            set(state, &district_key(w, 1), district.value());
        }),
        ("condition 9 ", |state, w| {
            for (d, change) in [(1, 1), (2, -1)] {
                let mut row = District::parse(value(state, &district_key(w, d))).unwrap();
                row.ytd += change;
                set(state, &district_key(w, d), row.value());
            }
        }),
        ("condition 10 ", |state, _| {
            break_row(state, "customer", |_, value| {
                let mut row = Customer::parse(value).unwrap();
                (row.balance, row.paid) = (row.balance - 1, row.paid + 1);
                Some(row.value())
            });
        }),
        ("condition 11 ", |state, _| {
            break_row(state, "customer", |_, value| {
                let mut row = Customer::parse(value).unwrap();
                row.deliveries += 1;
                Some(row.value())
            });
        }),
        ("condition 12 ", |state, _| {
            break_row(state, "customer", |_, value| {
                let mut row = Customer::parse(value).unwrap();
                row.paid += 1;
                Some(row.value())
            });
        }),
        ("S_YTD ", |state, _| {
            break_row(state, "stock", |key, value| {
                let numbers = key_numbers(key).unwrap();
                let mut row = Stock::parse(value, numbers[0], numbers[1]).unwrap();
                row.ytd += 1;
                Some(row.value())
            });
        }),
        ("index of last orders ", |state, w| {
            let (d, _, _, order) = waiting(state, w);
            set(state, &last_order_key(w, d, order.customer), "5".into());
        }),
        ("not a row of its table", |state, w| {
            set(state, &customer_key(w, 1, 1), "garbage".into());
        }),
    ];
    for (expected, change) in cases {
        let mut broken = state.clone();
        if expected == "not a row of its table" {
            broken.insert(customer_key(w, 1, 1), Read::default());
        }
        change(&mut broken, w);
        let problem = workload.audit_end(&broken).unwrap_err();
        assert!(problem.contains(expected), "{expected}: {problem}");
    }
}

/// Condition 4 is the sum of condition 6 over a district, and fails with it; by itself:
#[test]
fn condition_4_of_tpcc_fails_where_it_is_broken() {
    let (_, mut state, w) = tpcc_state();
    State::of(&state).unwrap().audit_warehouse(w).unwrap();
    let (_, _, key, mut order) = waiting(&state, w);
    order.count += 1;
    set(&mut state, &key, order.value());
    let problem = State::of(&state).unwrap().audit_warehouse(w).unwrap_err();
    assert!(problem.contains("condition 4 "), "{problem}");
}

#[test]
fn every_invariant_of_movr_fails_where_it_is_broken() {
    let options =
        Options { vehicles: Some(30), users: Some(90), read_only: Some(0.0), ..Options::default() };
    let mut workload = parse("movr", &options).unwrap();
    let mut serial = Serial::default();
    serial.run_many(workload.as_mut(), 2_000).unwrap();
    let state = left(workload.as_ref(), &serial);
    workload.audit_end(&state).unwrap();
    let rides = |state: &Reads, course: Course| -> Vec<(Key, Ride)> {
        let rides = state.iter().filter(|(key, _)| key.bytes().starts_with(b"ride{"));
        let ride = |(key, read): (&Key, &Read)| {
            Some((key.clone(), Ride::parse(read.value.as_ref()?).unwrap()))
        };
        rides.filter_map(ride).filter(|(_, ride)| ride.course == course).collect()
    };
    for course in [Course::Active, Course::Refused, Course::Ended] {
        assert!(!rides(&state, course).is_empty(), "no ride is {course:?}");
    }
    let vehicle_of =
        |ride: &Ride| Key::from(format!("vehicle{{{}}}:{}", ride.vehicle.0, ride.vehicle.1));
    // A second ride of a vehicle that is in one.
    let mut broken = state.clone();
    let (_, active) = rides(&state, Course::Active)[0].clone();
    let other =
        rides(&state, Course::Ended).into_iter().find(|(_, ride)| ride.vehicle == active.vehicle);
    let (key, mut ride) = other.unwrap_or_else(|| rides(&state, Course::Ended)[0].clone());
    ride.course = Course::Active;
    set(&mut broken, &key, ride.value());
    let problem = workload.audit_end(&broken).unwrap_err();
    assert!(problem.contains("is Active, and"), "{problem}");
    // A vehicle that forgot its ride.
    let mut broken = state.clone();
    set(&mut broken, &vehicle_of(&active), Rider::default().value());
    assert!(workload.audit_end(&broken).unwrap_err().contains("is in ride 0"));
    // A vehicle in a ride that it does not count.
    let mut broken = state.clone();
    set(&mut broken, &vehicle_of(&active), Rider { ride: 9, begun: 0, ended: 0 }.value());
    assert!(workload.audit_end(&broken).unwrap_err().contains("began 0 rides"));
    // A ride that ended and is gone.
    let mut broken = state.clone();
    let (key, _) = rides(&state, Course::Ended)[0].clone();
    broken.get_mut(&key).unwrap().value = None;
    assert!(workload.audit_end(&broken).unwrap_err().contains("it says that it began"));
}
