//! The list of all fields of a type, for the test that compares versions.

use crate::ordered::{OrdMap, OrdSet};

use super::Wire;

/// One member of a type: a field or a variant.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Member {
    /// Its number.
    pub number: u32,
    /// Its name.
    pub name: String,
    /// Its type; empty for a variant without fields.
    pub of: String,
}

/// A member in generated code: its number, its name, and what describes its type. Tables of these are
/// shorter than code that adds one member after the other.
#[derive(Clone, Copy, Debug)]
pub struct Described(pub u32, pub &'static str, pub fn(&mut Schema) -> String);

/// The fields and variants of a type, and of all types that it contains.
#[derive(Clone, Default, Debug)]
pub struct Schema {
    types: OrdMap<&'static str, Option<Vec<Member>>>,
}

impl Schema {
    /// The schema of `T` and of all types that it contains.
    #[must_use]
    pub fn of<T: Wire>() -> Self {
        let mut schema = Self::default();
        T::schema(&mut schema);
        schema
    }

    /// Adds a type and its members, unless it is there, and returns its name.
    pub fn describe(&mut self, name: &'static str, members: &[Described]) -> String {
        if !self.types.contains_key(name) {
            // A type may contain itself.
            self.types.insert(name, None);
            let member = |&Described(number, name, of): &Described| Member {
                number,
                name: name.to_owned(),
                of: of(self),
            };
            let members = members.iter().map(member).collect();
            self.types.insert(name, Some(members));
        }
        name.to_owned()
    }

    /// One line for each member: type, number, name and type of the member; sorted.
    #[must_use]
    pub fn lines(&self) -> OrdSet<String> {
        let mut lines = OrdSet::new();
        for (name, members) in &self.types {
            for member in members.iter().flatten() {
                let Member { number, name: field, of } = member;
                lines.insert(format!("{name} {number:>3} {field} {of}").trim_end().to_owned());
            }
        }
        lines
    }
}
