//! `movr`: MovR, Cockroach Labs' car-sharing application, with the mix of its load generator
//! (`workload run movr`), and the locality that Sloth §5.2 adds: users ride in their own city, and
//! sometimes in a region close to theirs or far from it. [`orthodrome_core::procedure::movr`] has
//! the rows of users, vehicles and rides, and the procedures that begin and end rides.
//!
//! All data of a city lies in one partition: its users, its vehicles, and the rides of its
//! vehicles. So a ride of a user who travels concerns two regions. All other transactions concern
//! one region, except that promotion codes may lie anywhere. A user or vehicle without a row has
//! had no ride yet; a code exists without a row.
//!
//! A vehicle is in at most one active ride, and so is a user. A request for a second ride is
//! refused, and the refusal is a commit. The published generator does not check, but writes as
//! much.

use std::collections::VecDeque;

use orthodrome_core::cluster::Cluster;
use orthodrome_core::ordered::{OrdMap, OrdSet};
use orthodrome_core::procedure::movr::{Course, Ride, Rider};
use orthodrome_core::procedure::{Call, Procedure, row};
use orthodrome_core::rng::Rng;
use orthodrome_core::txn::{Decision, Key, Kind, Op, Reads, Value};

use super::options::{Priorities, bounded, share};
use super::places::{Places, Reach};
use super::spread::{chance, weighted};
use super::{Issuer, Options, Request, Values, Workload, WorkloadError};

const BEGIN_RIDE: &str = "begin-ride";
const END_RIDE: &str = "end-ride";
const READ_VEHICLES: &str = "read-vehicles";
const UPDATE_RIDES: &str = "update-rides";
const ADD_USER: &str = "add-user";
const ADD_VEHICLE: &str = "add-vehicle";
const CREATE_CODE: &str = "create-promo-code";
const APPLY_CODE: &str = "apply-promo-code";
const CHECK: &str = "check";

const NAMES: [&str; 8] = [
    BEGIN_RIDE,
    END_RIDE,
    READ_VEHICLES,
    UPDATE_RIDES,
    ADD_USER,
    ADD_VEHICLE,
    CREATE_CODE,
    APPLY_CODE,
];

/// The transactions that do not read vehicles, in the generator's weights. Every writing
/// transaction comes with an update of the active rides.
const WRITING: [(u64, &str); 7] = [
    (100, UPDATE_RIDES),
    (40, BEGIN_RIDE),
    (30, ADD_USER),
    (10, ADD_VEHICLE),
    (10, APPLY_CODE),
    (7, END_RIDE),
    (3, CREATE_CODE),
];

/// The generator's share of reads.
const READ_ONLY: f64 = 0.95;

/// The number of vehicles that are shown at once.
const SHOWN: i64 = 25;

/// The number of rides whose locations are updated at once.
const UPDATED: usize = 10;

/// The number of rides that a client remembers in order to end them.
const REMEMBERED: usize = 100;

/// The number of promotion codes at the start.
const CODES: u64 = 1_000;

/// In each city, the vehicles all of whose rides are checked at the end of a run.
const CHECKED: i64 = 40;

/// A ride that a client requested.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Asked {
    number: i64,
    /// City and number.
    user: (i64, i64),
    vehicle: (i64, i64),
}

impl Asked {
    fn key(self) -> Key {
        ride_key(self.vehicle.0, self.number)
    }

    fn arguments(self) -> Value {
        let Self { number, user, vehicle } = self;
        row::format([[number, user.0, user.1, vehicle.0, vehicle.1].as_slice()])
    }
}

fn user_key((city, number): (i64, i64)) -> Key {
    format!("user{{{city}}}:{number}").into()
}

fn vehicle_key((city, number): (i64, i64)) -> Key {
    format!("vehicle{{{city}}}:{number}").into()
}

fn ride_key(city: i64, number: i64) -> Key {
    format!("ride{{{city}}}:{number}").into()
}

fn code_key(number: u64) -> Key {
    format!("promo-code{{code{number}}}").into()
}

/// The workload.
#[derive(Debug)]
pub struct Movr {
    is_ride_only: bool,
    cities: i64,
    users: u64,
    vehicles: u64,
    /// How often users ride in a close region and in a far one.
    travel: (f64, f64),
    read_only: f64,
    priorities: Priorities,
    places: Places,
    /// The last number given to a ride, or to a new user, vehicle or code.
    number: i64,
    /// Rides that each client, by index, may end.
    under_way: OrdMap<u32, VecDeque<Asked>>,
    /// Rides of the vehicles that are checked.
    checked: Vec<Asked>,
}

impl Movr {
    /// `cities` (3) in each region, and in each region `users` (1 M) and `vehicles` (10 000). A
    /// user takes a vehicle of a close region with probability `p_close` (0.1), and of a far region
    /// with `p_far` (0.05). Alternatively `multi_region` is the sum of both, two thirds of it
    /// close. A share `read_only` of the transactions shows vehicles: 0.95, or 0 with the parameter
    /// `begin-ride`. With that parameter all other transactions begin a ride.
    ///
    /// # Errors
    /// If an option makes no sense.
    pub fn new(parameter: Option<&str>, options: &Options) -> Result<Self, WorkloadError> {
        let known =
            ["cities", "users", "vehicles", "p_close", "p_far", "multi_region", "read_only"];
        options.only("movr", &known)?;
        let is_ride_only = match parameter {
            None => false,
            Some(BEGIN_RIDE) => true,
            Some(other) => {
                return Err(WorkloadError::Parameter {
                    spec: format!("movr:{other}"),
                    problem: format!("movr has no variant {other:?}"),
                    remedy: "use \"movr\" or \"movr:begin-ride\"".into(),
                });
            }
        };
        let contradicts = options.p_close.is_some() || options.p_far.is_some();
        if options.multi_region.is_some() && contradicts {
            return Err(WorkloadError::Option {
                field: "multi_region",
                problem: "conflicts with `p_close` and `p_far`".into(),
                remedy: "use either this option or those two".into(),
            });
        }
        let abroad = share("multi_region", options.multi_region, 0.15)?;
        let close = share("p_close", options.p_close, abroad * 2.0 / 3.0)?;
        let far = share("p_far", options.p_far, abroad / 3.0)?;
        if close + far > 1.0 {
            return Err(WorkloadError::Option {
                field: "p_far",
                problem: format!("the sum of {far} and `p_close` = {close} is above 1"),
                remedy: "use smaller shares".into(),
            });
        }
        let cities = bounded("cities", options.cities, 3, (1, 1_000))?;
        let per_city = |number: u64| number.div_ceil(cities);
        let users = bounded("users", options.users, 1_000_000, (cities, 1 << 40))?;
        let vehicles = bounded("vehicles", options.vehicles, 10_000, (cities, 1 << 40))?;
        let read_only = if is_ride_only { 0.0 } else { READ_ONLY };
        let cities = i64::try_from(cities).unwrap_or(i64::MAX);
        Ok(Self {
            is_ride_only,
            cities,
            users: per_city(users),
            vehicles: per_city(vehicles),
            travel: (close, far),
            read_only: share("read_only", options.read_only, read_only)?,
            priorities: options.priorities(&NAMES)?,
            places: Places::alone(cities),
            number: 0,
            under_way: OrdMap::new(),
            checked: Vec::new(),
        })
    }

    fn next_number(&mut self) -> i64 {
        self.number += 1;
        self.number
    }

    fn user(&self, city: i64, rng: &mut Rng) -> (i64, i64) {
        (city, rng.below(self.users).cast_signed())
    }

    fn procedure(&self, name: &'static str, ops: Vec<Op>, rng: &mut Rng) -> Request {
        let keys = |of: fn(&Op) -> &[Key]| {
            let mut seen = OrdSet::new();
            ops.iter().flat_map(of).filter(|key| seen.insert(*key)).cloned().collect()
        };
        let (reads, writes) = (keys(Op::reads), keys(Op::writes));
        let priority = self.priorities.draw(name, rng);
        Request {
            name,
            kind: Kind::Procedure(ops),
            reads,
            writes,
            priority,
            parameter: 0,
            scan: None,
        }
    }

    fn begin_ride(&mut self, issuer: Issuer, home: usize, city: i64, rng: &mut Rng) -> Request {
        let user = self.user(city, rng);
        let (close, far) = self.travel;
        let drawn = rng.unit();
        let reach = if drawn < close {
            Reach::Close
        } else if drawn < close + far {
            Reach::Far
        } else {
            Reach::Local
        };
        let place = self.places.other_at(home, reach, rng);
        let vehicle_city = if place == home { city } else { self.places.pick(place, rng) };
        let vehicle = (vehicle_city, rng.below(self.vehicles).cast_signed());
        let asked = Asked { number: self.next_number(), user, vehicle };
        if vehicle.1 < CHECKED {
            self.checked.push(asked);
        }
        if !self.is_ride_only {
            let mine = self.under_way.entry(issuer.index).or_default();
            mine.push_back(asked);
            if mine.len() > REMEMBERED {
                mine.pop_front();
            }
        }
        let (user, vehicle) = (user_key(user), vehicle_key(vehicle));
        let call = Call {
            procedure: Procedure::MovrBeginRide,
            reads: vec![user.clone(), vehicle.clone()],
            writes: vec![user, vehicle, asked.key()],
            arguments: asked.arguments(),
        };
        self.procedure(BEGIN_RIDE, vec![Op::Call(call)], rng)
    }

    fn end_ride(&mut self, issuer: Issuer, rng: &mut Rng) -> Option<Request> {
        let asked = self.under_way.get_mut(&issuer.index)?.pop_front()?;
        let keys = vec![user_key(asked.user), vehicle_key(asked.vehicle), asked.key()];
        let call = Call {
            procedure: Procedure::MovrEndRide,
            reads: keys.clone(),
            writes: keys,
            arguments: asked.arguments(),
        };
        Some(self.procedure(END_RIDE, vec![Op::Call(call)], rng))
    }

    /// Updates the locations of vehicles: one location for each ride, which replaces the previous
    /// one.
    fn update_rides(&self, issuer: Issuer, rng: &mut Rng) -> Option<Request> {
        let mine = self.under_way.get(&issuer.index)?;
        let mut ops = Vec::new();
        for asked in mine.iter().take(UPDATED) {
            // A location belongs to a ride that exists.
            ops.push(Op::Get(asked.key()));
            let key = format!("location{{{}}}:{}", asked.vehicle.0, asked.number);
            let (latitude, longitude) = (rng.below(180_000), rng.below(360_000));
            ops.push(Op::Put(key.into(), format!("{latitude} {longitude}").into()));
        }
        (!ops.is_empty()).then(|| self.procedure(UPDATE_RIDES, ops, rng))
    }

    fn read_vehicles(&self, city: i64, rng: &mut Rng) -> Request {
        let count = self.vehicles.min(SHOWN.cast_unsigned());
        let first = rng.below(self.vehicles - count + 1).cast_signed();
        let reads = (first..first + count.cast_signed()).map(|number| vehicle_key((city, number)));
        let (reads, writes) = (reads.collect(), Vec::new());
        let priority = self.priorities.draw(READ_VEHICLES, rng);
        let kind = Kind::ReadOnly;
        Request { name: READ_VEHICLES, kind, reads, writes, priority, parameter: 0, scan: None }
    }

    /// A row that did not exist before.
    fn insert(&self, name: &'static str, needs: Option<Key>, key: Key, rng: &mut Rng) -> Request {
        let value = Rider::default().value();
        let needs = needs.into_iter().map(Op::Get);
        let ops = needs.chain([Op::Compare(key.clone(), None), Op::Put(key, value)]);
        let ops = ops.collect();
        self.procedure(name, ops, rng)
    }

    fn apply_code(&self, city: i64, rng: &mut Rng) -> Request {
        let (user, code) = (self.user(city, rng), rng.below(CODES));
        let used = Key::from(format!("user-code{{{city}}}:{}:{code}", user.1));
        let ops = vec![
            Op::Get(user_key(user)),
            Op::Get(code_key(code)),
            Op::Compare(used.clone(), None),
            Op::Put(used, "1".into()),
        ];
        self.procedure(APPLY_CODE, ops, rng)
    }

    fn writing(
        &mut self,
        issuer: Issuer,
        home: usize,
        city: i64,
        rng: &mut Rng,
    ) -> Option<Request> {
        if self.is_ride_only {
            return Some(self.begin_ride(issuer, home, city, rng));
        }
        let (name, number) = (weighted(&WRITING, rng).copied()?, self.next_number());
        // A number above those that exist at the start.
        let fresh = |known: u64| known.cast_signed().saturating_add(number);
        match name {
            BEGIN_RIDE => Some(self.begin_ride(issuer, home, city, rng)),
            END_RIDE => self.end_ride(issuer, rng),
            UPDATE_RIDES => self.update_rides(issuer, rng),
            ADD_USER => Some(self.insert(name, None, user_key((city, fresh(self.users))), rng)),
            ADD_VEHICLE => {
                let owner = user_key(self.user(city, rng));
                let vehicle = vehicle_key((city, fresh(self.vehicles)));
                Some(self.insert(name, Some(owner), vehicle, rng))
            }
            CREATE_CODE => {
                let code = code_key(fresh(CODES).cast_unsigned());
                Some(self.insert(name, None, code, rng))
            }
            _ => Some(self.apply_code(city, rng)),
        }
    }
}

/// A user, a vehicle or a ride by its row.
enum Found {
    Rider(Rider),
    Ride(Option<Ride>),
    Other,
}

fn found(key: &Key, value: Option<&Value>) -> Result<Found, String> {
    let bad = || format!("{key} holds {value:?}, which is not a row of its table");
    let is_of = |table: &[u8]| key.bytes().starts_with(table);
    if is_of(b"user{") || is_of(b"vehicle{") {
        let rider = Rider::parse(value).ok_or_else(bad)?;
        let is_riding = i64::from(rider.ride != 0);
        if rider.begun.checked_sub(rider.ended) != Some(is_riding) {
            return Err(format!(
                "{key} began {} rides and ended {}; it is in ride {} (0 is none)",
                rider.begun, rider.ended, rider.ride
            ));
        }
        Ok(Found::Rider(rider))
    } else if is_of(b"ride{") {
        let ride = value.map(|value| Ride::parse(value).ok_or_else(bad)).transpose()?;
        Ok(Found::Ride(ride))
    } else {
        Ok(Found::Other)
    }
}

/// Checks the invariants of any rows that were read together: a vehicle and a user agree with their
/// rides.
fn audit(reads: &Reads) -> Result<(), String> {
    for (key, read) in reads {
        let (Found::Ride(Some(ride)), Some((_, number))) = (
            found(key, read.value.as_ref())?,
            std::str::from_utf8(key.bytes()).unwrap_or_default().split_once(':'),
        ) else {
            continue;
        };
        let number = number.parse::<i64>().ok();
        for rider in [user_key(ride.user), vehicle_key(ride.vehicle)] {
            let Some(read) = reads.get(&rider) else { continue };
            let Found::Rider(row) = found(&rider, read.value.as_ref())? else { continue };
            let is_in_it = Some(row.ride) == number;
            if is_in_it != (ride.course == Course::Active) {
                return Err(format!(
                    "{key} is {:?}, and {rider} is in ride {} (0 is none)",
                    ride.course, row.ride
                ));
            }
        }
    }
    Ok(())
}

impl Workload for Movr {
    fn name(&self) -> String {
        if self.is_ride_only { "movr:begin-ride" } else { "movr" }.into()
    }

    fn values(&self) -> Values {
        Values::Versions
    }

    fn place(&mut self, cluster: &Cluster) {
        self.places = Places::of(cluster, self.cities);
    }

    fn next(&mut self, issuer: Issuer, rng: &mut Rng) -> Request {
        let home = self.places.home(issuer.region);
        let city = self.places.pick(home, rng);
        let writing =
            if chance(self.read_only, rng) { None } else { self.writing(issuer, home, city, rng) };
        // A client without a ride to end or to update looks for a vehicle.
        writing.unwrap_or_else(|| self.read_vehicles(city, rng))
    }

    fn decide(&self, _: &Request, _: &Reads) -> Decision {
        // This workload has no interactive transactions.
        Decision::Abort
    }

    fn audit(&self, request: &Request, reads: &Reads) -> Result<(), String> {
        if let Some(key) = request.reads.iter().find(|key| !reads.contains_key(*key)) {
            return Err(format!("{key} was requested but not read"));
        }
        if request.name == CHECK { Ok(()) } else { audit(reads) }
    }

    fn final_requests(&self) -> Vec<Request> {
        let mut keys = OrdSet::new();
        for asked in &self.checked {
            keys.extend([user_key(asked.user), vehicle_key(asked.vehicle), asked.key()]);
        }
        let keys: Vec<Key> = keys.into_iter().collect();
        Request::checks(CHECK, &keys)
    }

    /// Checks that each checked vehicle has as many rides as its row says, and is in at most one.
    fn audit_end(&self, reads: &Reads) -> Result<(), String> {
        audit(reads)?;
        let mut rides: OrdMap<(i64, i64), [i64; 2]> = OrdMap::new();
        for asked in &self.checked {
            let [active, ended] = rides.entry(asked.vehicle).or_default();
            let Some(value) = reads.get(&asked.key()).and_then(|read| read.value.as_ref()) else {
                continue;
            };
            let Some(ride) = Ride::parse(value) else { continue };
            if (ride.user, ride.vehicle) != (asked.user, asked.vehicle) {
                return Err(format!("{} holds {value}, which nobody asked for", asked.key()));
            }
            *active += i64::from(ride.course == Course::Active);
            *ended += i64::from(ride.course == Course::Ended);
        }
        for (vehicle, [active, ended]) in rides {
            let key = vehicle_key(vehicle);
            let row = reads.get(&key).and_then(|read| Rider::parse(read.value.as_ref()));
            let row = row.ok_or_else(|| format!("{key} was requested but not read"))?;
            if active > 1 || (row.begun, row.ended) != (active + ended, ended) {
                return Err(format!(
                    "{key} has {active} rides under way and {ended} that ended; it says that it \
                     began {} and ended {}",
                    row.begun, row.ended
                ));
            }
        }
        Ok(())
    }
}
