//! The cases, by what they are about. Each group lists its own; this list is of groups only.

mod batch;
mod claim;
mod data;
mod enqueue;
mod events;
mod handover;
mod inspect;
mod lease;
mod model;
mod orphan;
mod purge;
mod recover;
mod settle;
mod setup;
mod steps;
mod transaction;
mod unique;
mod update;
mod wait;
mod waits;

use crate::case::Case;

/// Every case of the suite.
pub fn cases() -> Vec<Case> {
    let groups = [
        batch::CASES,
        claim::CASES,
        data::CASES,
        enqueue::CASES,
        events::CASES,
        handover::CASES,
        inspect::CASES,
        lease::CASES,
        model::CASES,
        orphan::CASES,
        purge::CASES,
        recover::CASES,
        settle::CASES,
        setup::CASES,
        steps::CASES,
        transaction::CASES,
        unique::CASES,
        update::CASES,
        wait::CASES,
        waits::CASES,
    ];
    groups.concat()
}
