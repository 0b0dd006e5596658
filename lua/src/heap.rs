//! Everything that a script has made: strings, tables, functions and variables that functions
//! share; and the work that it may still do.
//!
//! Nothing is freed before the script ends, except all at once. So there is no collector whose
//! moments a script could observe, and the bound on work is also the bound on memory: whatever is
//! made counts at least the bytes that it takes.

use std::rc::Rc;

use crate::code::Proto;
use crate::index::Index;
use crate::table::{Cost, Table};
use crate::value::{StringId, TableId, Value, mix};

/// Why a script stops.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Stop {
    /// An error, which the script can catch.
    Error(Value),
    /// The script has done all the work that it may do. It cannot catch this.
    Exhausted,
}

/// What a function shares with the functions inside it.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Cell {
    /// A variable of a function that runs, at this position of the stack.
    Open(usize),
    /// A variable of a function that has returned.
    Closed(Value),
}

/// A function with what it captured.
#[derive(Clone, Debug)]
pub(crate) enum Closure {
    /// A function of a script.
    Script {
        /// Its code.
        proto: Rc<Proto>,
        /// Its captured variables, as numbers of cells.
        cells: Rc<[u32]>,
    },
    /// A function of the library with state.
    Native {
        /// Which one.
        function: u16,
        /// The state.
        state: [Value; 3],
    },
}

/// The bytes that a string counts besides its own.
const STRING_BYTES: u64 = 48;
const TABLE_BYTES: u64 = 160;
const CLOSURE_BYTES: u64 = 64;
const CELL_BYTES: u64 = 32;
/// Steps of a search that cost no more than the instruction that needs it.
const FREE_STEPS: u64 = 8;

/// See the module.
#[derive(Debug)]
pub struct Heap {
    strings: Vec<Rc<[u8]>>,
    string_index: Index,
    tables: Vec<Table>,
    cells: Vec<Cell>,
    closures: Vec<Closure>,
    left: u64,
}

fn hash_bytes(bytes: &[u8]) -> u64 {
    let mut hash = bytes.len() as u64;
    for chunk in bytes.chunks(8) {
        let word = chunk.iter().rev().fold(0_u64, |word, byte| (word << 8) | u64::from(*byte));
        hash = mix(hash.rotate_left(23) ^ word);
    }
    hash
}

fn count(length: usize) -> u32 {
    // The work of a script is bounded far below this number of values.
    u32::try_from(length).unwrap_or(u32::MAX)
}

impl Heap {
    pub(crate) fn new(work: u64) -> Self {
        Self {
            strings: Vec::new(),
            string_index: Index::default(),
            tables: Vec::new(),
            cells: Vec::new(),
            closures: Vec::new(),
            left: work,
        }
    }

    /// The work that is left.
    #[must_use]
    pub fn left(&self) -> u64 {
        self.left
    }

    /// Counts work.
    ///
    /// # Errors
    /// Not so much is left. Then nothing is left.
    #[inline]
    pub fn charge(&mut self, work: u64) -> Result<(), Stop> {
        match self.left.checked_sub(work) {
            Some(left) => {
                self.left = left;
                Ok(())
            }
            None => {
                self.left = 0;
                Err(Stop::Exhausted)
            }
        }
    }

    /// Counts the length of something that is passed over.
    pub(crate) fn charge_length(&mut self, length: usize) -> Result<(), Stop> {
        self.charge(length as u64)
    }

    fn charge_steps(&mut self, steps: u64) -> Result<(), Stop> {
        if steps > FREE_STEPS { self.charge(4 * (steps - FREE_STEPS)) } else { Ok(()) }
    }

    /// The string with these bytes.
    ///
    /// # Errors
    /// Too much work.
    pub fn string(&mut self, bytes: &[u8]) -> Result<StringId, Stop> {
        // Reading them counts, whether they are known or not.
        self.charge_length(bytes.len() / 4)?;
        let hash = hash_bytes(bytes);
        let is_wanted =
            |at: u32| self.strings.get(at as usize).is_some_and(|own| own.as_ref() == bytes);
        let (found, steps) = self.string_index.find(hash, is_wanted);
        self.charge_steps(steps)?;
        if let Some(found) = found {
            return Ok(StringId(found));
        }
        self.charge(STRING_BYTES + bytes.len() as u64)?;
        let at = count(self.strings.len());
        if self.string_index.is_full() {
            let strings = &self.strings;
            self.string_index
                .rebuild(at, |at| strings.get(at as usize).map_or(0, |own| hash_bytes(own)));
        }
        self.strings.push(Rc::from(bytes));
        self.string_index.insert(hash, at);
        Ok(StringId(at))
    }

    /// A string value with these bytes.
    ///
    /// # Errors
    /// Too much work.
    pub fn text(&mut self, bytes: &[u8]) -> Result<Value, Stop> {
        self.string(bytes).map(Value::String)
    }

    /// The bytes of a string.
    #[must_use]
    pub fn bytes(&self, string: StringId) -> Rc<[u8]> {
        self.strings.get(string.0 as usize).cloned().unwrap_or_default()
    }

    pub(crate) fn length(&self, string: StringId) -> usize {
        self.strings.get(string.0 as usize).map_or(0, |bytes| bytes.len())
    }

    pub(crate) fn shown(&self, string: StringId) -> String {
        String::from_utf8_lossy(&self.bytes(string)).into_owned()
    }

    /// A new table.
    ///
    /// # Errors
    /// Too much work.
    pub fn new_table(&mut self) -> Result<TableId, Stop> {
        self.charge(TABLE_BYTES)?;
        self.tables.push(Table::default());
        Ok(TableId(count(self.tables.len() - 1)))
    }

    pub(crate) fn table(&self, table: TableId) -> Option<&Table> {
        self.tables.get(table.0 as usize)
    }

    pub(crate) fn table_mut(&mut self, table: TableId) -> Option<&mut Table> {
        self.tables.get_mut(table.0 as usize)
    }

    /// The value of a key.
    ///
    /// # Errors
    /// Too much work.
    #[inline]
    pub fn get(&mut self, table: TableId, key: Value) -> Result<Value, Stop> {
        let (value, steps) = self.table(table).map_or((Value::Nil, 0), |table| table.get(key));
        self.charge_steps(steps)?;
        Ok(value)
    }

    /// The value of a key that is a string.
    ///
    /// # Errors
    /// Too much work.
    pub fn field(&mut self, table: TableId, name: &str) -> Result<Value, Stop> {
        let name = self.text(name.as_bytes())?;
        self.get(table, name)
    }

    /// Sets a key, whether or not the table may be changed by the script. A key that is nil or NaN
    /// is ignored.
    ///
    /// # Errors
    /// Too much work.
    pub fn set(&mut self, table: TableId, key: Value, value: Value) -> Result<(), Stop> {
        let is_nan = matches!(key, Value::Number(number) if number.is_nan());
        if key.is_nil() || is_nan {
            return Ok(());
        }
        let cost = self.table_mut(table).map_or_else(Cost::default, |table| table.set(key, value));
        self.charge(cost.bytes)?;
        self.charge_steps(cost.steps)
    }

    /// Sets a key that is a string.
    ///
    /// # Errors
    /// Too much work.
    pub fn set_field(&mut self, table: TableId, name: &str, value: Value) -> Result<(), Stop> {
        let name = self.text(name.as_bytes())?;
        self.set(table, name, value)
    }

    /// Sets elements from `first`.
    ///
    /// # Errors
    /// Too much work.
    pub fn set_list(&mut self, table: TableId, first: usize, values: &[Value]) -> Result<(), Stop> {
        let cost =
            self.table_mut(table).map_or_else(Cost::default, |own| own.set_list(first, values));
        self.charge(cost.bytes)?;
        self.charge_steps(cost.steps)
    }

    /// The number of elements of a table.
    #[must_use]
    pub fn table_length(&self, table: TableId) -> usize {
        self.table(table).map_or(0, Table::len)
    }

    /// The element of a table at this position, from 1.
    #[must_use]
    pub fn element(&self, table: TableId, position: usize) -> Value {
        self.table(table).map_or(Value::Nil, |table| table.at(position))
    }

    /// The key after `key` and its value; none at the end. The error is none if there is no such
    /// key.
    pub(crate) fn next(
        &mut self,
        table: TableId,
        key: Value,
    ) -> Result<Option<Option<(Value, Value)>>, Stop> {
        let (next, steps) = self.table(table).map_or((Some(None), 0), |table| table.next(key));
        self.charge_steps(steps)?;
        Ok(next)
    }

    /// All keys and values, in the order of `pairs`.
    ///
    /// # Errors
    /// Too much work.
    pub fn pairs(&mut self, table: TableId) -> Result<Vec<(Value, Value)>, Stop> {
        let size = self.table(table).map_or(0, Table::size);
        self.charge(32 * size as u64)?;
        let (mut pairs, mut key) = (Vec::new(), Value::Nil);
        while let Some(Some((next, value))) = self.next(table, key)? {
            pairs.push((next, value));
            key = next;
        }
        Ok(pairs)
    }

    /// Forbids the script to change a table.
    pub fn protect(&mut self, table: TableId) {
        if let Some(table) = self.table_mut(table) {
            table.is_read_only = true;
        }
    }

    pub(crate) fn is_read_only(&self, table: TableId) -> bool {
        self.table(table).is_some_and(|table| table.is_read_only)
    }

    pub(crate) fn meta(&self, table: TableId) -> Option<TableId> {
        self.table(table)?.meta
    }

    pub(crate) fn set_meta(&mut self, table: TableId, meta: Option<TableId>) {
        if let Some(table) = self.table_mut(table) {
            table.meta = meta;
        }
    }

    pub(crate) fn new_closure(&mut self, closure: Closure) -> Result<Value, Stop> {
        let captured = match &closure {
            Closure::Script { cells, .. } => cells.len() as u64,
            Closure::Native { .. } => 0,
        };
        self.charge(CLOSURE_BYTES + 4 * captured)?;
        self.closures.push(closure);
        Ok(Value::Closure(count(self.closures.len() - 1)))
    }

    pub(crate) fn closure(&self, closure: u32) -> Option<&Closure> {
        self.closures.get(closure as usize)
    }

    pub(crate) fn closure_mut(&mut self, closure: u32) -> Option<&mut Closure> {
        self.closures.get_mut(closure as usize)
    }

    pub(crate) fn new_cell(&mut self, position: usize) -> Result<u32, Stop> {
        self.charge(CELL_BYTES)?;
        self.cells.push(Cell::Open(position));
        Ok(count(self.cells.len() - 1))
    }

    pub(crate) fn cell(&self, cell: u32) -> Cell {
        self.cells.get(cell as usize).copied().unwrap_or(Cell::Closed(Value::Nil))
    }

    pub(crate) fn set_cell(&mut self, cell: u32, now: Cell) {
        if let Some(cell) = self.cells.get_mut(cell as usize) {
            *cell = now;
        }
    }
}
