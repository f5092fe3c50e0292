//! The cases, by what they are about. Each group lists its own; this list is of groups only.

mod batch;
mod claim;
mod data;
mod enqueue;
mod inspect;
mod lease;
mod model;
mod orphan;
mod purge;
mod recover;
mod settle;
mod setup;
mod transaction;
mod unique;
mod update;
mod wait;

use crate::case::Case;

/// Every case of the suite.
pub fn cases() -> Vec<Case> {
    let groups = [
        batch::CASES,
        claim::CASES,
        data::CASES,
        enqueue::CASES,
        inspect::CASES,
        lease::CASES,
        model::CASES,
        orphan::CASES,
        purge::CASES,
        recover::CASES,
        settle::CASES,
        setup::CASES,
        transaction::CASES,
        unique::CASES,
        update::CASES,
        wait::CASES,
    ];
    groups.concat()
}
