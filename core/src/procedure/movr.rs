//! MovR's rides (Cockroach Labs' car-sharing application; Sloth §5.2): a user takes a vehicle, and
//! returns it.
//!
//! A ride begins if the vehicle is free and the user has no ride. Otherwise the ride is refused. A
//! refusal is an answer, not an abort: the ride is stored as refused, and every key is written in
//! both cases. So the write set of a transaction does not depend on how busy the vehicles are.

use super::{Results, row};
use crate::txn::{AbortReason, Value};

/// A user or a vehicle; both have the same row.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Rider {
    /// The active ride; 0 if there is none.
    pub ride: i64,
    /// The number of rides begun, without refused ones.
    pub begun: i64,
    /// The number of rides ended.
    pub ended: i64,
}

impl Rider {
    /// Reads a row. A missing row is a user or a vehicle without any ride.
    #[must_use]
    pub fn parse(value: Option<&Value>) -> Option<Self> {
        let Some(value) = value else { return Some(Self::default()) };
        match row::parse(value)?.as_slice() {
            [group] => match group.as_slice() {
                &[ride, begun, ended] => Some(Self { ride, begun, ended }),
                _ => None,
            },
            _ => None,
        }
    }

    /// Its row.
    #[must_use]
    pub fn value(self) -> Value {
        row::format([[self.ride, self.begun, self.ended].as_slice()])
    }
}

/// The state of a ride.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Course {
    /// The vehicle was taken, or the user had another ride.
    Refused,
    /// The ride is active.
    Active,
    /// The ride has ended.
    Ended,
}

/// A ride.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Ride {
    /// Its state.
    pub course: Course,
    /// The user's city and number.
    pub user: (i64, i64),
    /// The vehicle's city and number.
    pub vehicle: (i64, i64),
}

impl Ride {
    /// From its row.
    #[must_use]
    pub fn parse(value: &Value) -> Option<Self> {
        let groups = row::parse(value)?;
        let [group] = groups.as_slice() else { return None };
        let &[course, user_city, user, vehicle_city, vehicle] = group.as_slice() else {
            return None;
        };
        let course = match course {
            0 => Course::Refused,
            1 => Course::Active,
            2 => Course::Ended,
            _ => return None,
        };
        Some(Self { course, user: (user_city, user), vehicle: (vehicle_city, vehicle) })
    }

    /// Its row.
    #[must_use]
    pub fn value(&self) -> Value {
        let course = match self.course {
            Course::Refused => 0,
            Course::Active => 1,
            Course::Ended => 2,
        };
        let Self { user, vehicle, .. } = self;
        row::format([[course, user.0, user.1, vehicle.0, vehicle.1].as_slice()])
    }
}

/// Begins a ride. Reads the user and the vehicle; writes the user, the vehicle and the ride.
/// Arguments: the ride's number, above 0; city and number of the user; city and number of the
/// vehicle.
///
/// # Errors
/// A guard, if rows or arguments have the wrong form.
pub fn begin_ride(reads: &[Option<Value>], arguments: &Value) -> Results {
    let (number, mut ride) = ride_of(arguments)?;
    let [user, vehicle] = reads else { return Err(AbortReason::Guard) };
    let mut user = Rider::parse(user.as_ref()).ok_or(AbortReason::Guard)?;
    let mut vehicle = Rider::parse(vehicle.as_ref()).ok_or(AbortReason::Guard)?;
    if user.ride == 0 && vehicle.ride == 0 {
        ride.course = Course::Active;
        for rider in [&mut user, &mut vehicle] {
            rider.ride = number;
            rider.begun = rider.begun.saturating_add(1);
        }
    }
    Ok(vec![Some(user.value()), Some(vehicle.value()), Some(ride.value())])
}

/// Ends a ride, if it is active. Reads and writes the user, the vehicle and the ride. Arguments as
/// for [`begin_ride`].
///
/// # Errors
/// A guard, if rows or arguments have the wrong form, or contradict each other.
pub fn end_ride(reads: &[Option<Value>], arguments: &Value) -> Results {
    let (number, asked) = ride_of(arguments)?;
    let [user, vehicle, ride] = reads else { return Err(AbortReason::Guard) };
    let mut user = Rider::parse(user.as_ref()).ok_or(AbortReason::Guard)?;
    let mut vehicle = Rider::parse(vehicle.as_ref()).ok_or(AbortReason::Guard)?;
    let Some(ride) = ride else {
        // The ride has not begun. Its row stays missing, but the other rows are written.
        return Ok(vec![Some(user.value()), Some(vehicle.value()), None]);
    };
    let mut ride = Ride::parse(ride).ok_or(AbortReason::Guard)?;
    if (ride.user, ride.vehicle) != (asked.user, asked.vehicle) {
        return Err(AbortReason::Guard);
    }
    if ride.course == Course::Active {
        ride.course = Course::Ended;
        for rider in [&mut user, &mut vehicle] {
            if rider.ride != number {
                return Err(AbortReason::Guard);
            }
            rider.ride = 0;
            rider.ended = rider.ended.saturating_add(1);
        }
    }
    Ok(vec![Some(user.value()), Some(vehicle.value()), Some(ride.value())])
}

fn ride_of(arguments: &Value) -> Result<(i64, Ride), AbortReason> {
    let groups = row::parse(arguments).ok_or(AbortReason::Guard)?;
    match groups.as_slice() {
        [group] => match group.as_slice() {
            &[number, user_city, user, vehicle_city, vehicle] if number > 0 => {
                let (user, vehicle) = ((user_city, user), (vehicle_city, vehicle));
                Ok((number, Ride { course: Course::Refused, user, vehicle }))
            }
            _ => Err(AbortReason::Guard),
        },
        _ => Err(AbortReason::Guard),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rider(value: Option<&Value>) -> Rider {
        Rider::parse(value).unwrap()
    }

    #[test]
    fn a_vehicle_is_in_one_ride_until_that_ends() {
        let first = begin_ride(&[None, None], &"7 1 10 2 20".into()).unwrap();
        let [user, vehicle, ride] = first.as_slice() else { panic!("{first:?}") };
        assert_eq!(rider(user.as_ref()), Rider { ride: 7, begun: 1, ended: 0 });
        assert_eq!(Ride::parse(ride.as_ref().unwrap()).unwrap().course, Course::Active);
        // Another user, the same vehicle.
        let second = begin_ride(&[None, vehicle.clone()], &"8 1 11 2 20".into()).unwrap();
        assert_eq!(rider(second[0].as_ref()), Rider::default());
        assert_eq!(second[1], *vehicle);
        assert_eq!(Ride::parse(second[2].as_ref().unwrap()).unwrap().course, Course::Refused);
        // The same user, another vehicle.
        let third = begin_ride(&[user.clone(), None], &"9 1 10 2 21".into()).unwrap();
        assert_eq!((&third[0], rider(third[1].as_ref())), (user, Rider::default()));
        // The ride ends once.
        let ended = end_ride(&first, &"7 1 10 2 20".into()).unwrap();
        assert_eq!(rider(ended[0].as_ref()), Rider { ride: 0, begun: 1, ended: 1 });
        assert_eq!(rider(ended[1].as_ref()), Rider { ride: 0, begun: 1, ended: 1 });
        assert_eq!(end_ride(&ended, &"7 1 10 2 20".into()).unwrap(), ended);
        assert!(begin_ride(&[ended[0].clone(), ended[1].clone()], &"10 1 10 2 20".into()).is_ok());
    }

    #[test]
    fn a_ride_ends_only_with_its_own_user_and_vehicle() {
        let begun = begin_ride(&[None, None], &"7 1 10 2 20".into()).unwrap();
        assert_eq!(end_ride(&begun, &"7 1 11 2 20".into()), Err(AbortReason::Guard));
        let mut other = begun.clone();
        other[1] = Some(Rider { ride: 3, begun: 1, ended: 0 }.value());
        assert_eq!(end_ride(&other, &"7 1 10 2 20".into()), Err(AbortReason::Guard));
        let absent = end_ride(&[None, None, None], &"7 1 10 2 20".into()).unwrap();
        assert_eq!(absent[2], None);
    }

    #[test]
    fn rides_come_back_as_they_were() {
        for course in [Course::Refused, Course::Active, Course::Ended] {
            let ride = Ride { course, user: (3, 4), vehicle: (5, 6) };
            assert_eq!(Ride::parse(&ride.value()), Some(ride));
        }
        assert_eq!(Ride::parse(&"3 1 1 1 1".into()), None);
    }
}
