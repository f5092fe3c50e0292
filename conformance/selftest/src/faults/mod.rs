//! The faults, by what is wrong. Each file lists its own; this list is of files only.

mod batch;
mod claim;
mod compare;
mod data;
mod enqueue;
mod errors;
mod events;
mod handles;
mod handover;
mod histories;
mod inspect;
mod lease;
mod recover;
mod settle;
mod setup;
mod steps;
mod transaction;
mod unique;
mod update;
mod waits;
mod writes;

use crate::Fault;

/// Every fault.
pub fn faults() -> Vec<Fault> {
    [
        compare::FAULTS,
        handles::FAULTS,
        errors::FAULTS,
        update::FAULTS,
        batch::FAULTS,
        claim::FAULTS,
        writes::FAULTS,
        lease::FAULTS,
        recover::FAULTS,
        settle::FAULTS,
        enqueue::FAULTS,
        unique::FAULTS,
        data::FAULTS,
        inspect::FAULTS,
        transaction::FAULTS,
        setup::FAULTS,
        steps::FAULTS,
        waits::FAULTS,
        events::FAULTS,
        handover::FAULTS,
        histories::FAULTS,
    ]
    .concat()
}
