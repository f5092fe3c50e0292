//! Events: for how long they are kept, and which payload is.

use std::sync::atomic::Ordering;

use async_trait::async_trait;
use queue_core::*;

use super::data::normalised;
use crate::Fault;
use crate::broken::Real;
use crate::broken::gap;
use crate::fault::Wrong;

const MINUTE: i64 = 60_000;

pub(super) const FAULTS: &[Fault] = &[
    Fault::new(
        "events::the_last_payload_wins",
        &Does(Mode::TheLastPayloadWins),
        "`ON CONFLICT DO UPDATE`: an event that is emitted again has the new payload.",
        &["events::the_first_payload_wins", "waits::are_woken_once"],
    )
    .everywhere(),
    Fault::new(
        "events::kept_is_new",
        &Does(Mode::KeptIsNew),
        "Whoever emits an event that is kept is told that it is new.",
        &["events::the_first_payload_wins", "waits::are_woken_once"],
    )
    .everywhere(),
    Fault::new(
        "events::kept_for_ever",
        &Emits(|event| event.keep = Delay::MAX),
        "Events are kept for ever.",
        &[
            "events::are_kept_for_their_time",
            "events::come_again_after_their_time",
            "events::that_are_not_kept",
            "events::purges_are_limited",
        ],
    )
    .everywhere(),
    Fault::new(
        "events::gone_early",
        &Emits(|event| event.keep = Delay::from_millis(event.keep.as_millis() - 2 * MINUTE).unwrap_or(Delay::ZERO)),
        "Events are gone before their time.",
        &["events::are_kept_for_their_time"],
    )
    .everywhere(),
    Fault::new(
        "events::not_kept",
        &Emits(|event| event.keep = Delay::ZERO),
        "Events are not kept.",
        &[
            "events::the_first_payload_wins",
            "events::are_kept_for_their_time",
            "waits::an_event_before_the_wait_is_found",
            "waits::go_on_if_somebody_wants_it",
        ],
    )
    .everywhere(),
    Fault::new(
        "events::never_new_again",
        &Does(Mode::NeverNewAgain),
        "`ON CONFLICT DO NOTHING`: a key that was not purged is kept, also after its time.",
        &["events::come_again_after_their_time", "waits::race_beside_an_old_event", "events::that_are_not_kept"],
    )
    .everywhere(),
    Fault::new(
        "events::kept_for_a_minute_at_least",
        &Emits(|event| {
            if event.keep == Delay::ZERO {
                event.keep = Delay::from_millis(MINUTE).unwrap_or(Delay::MAX);
            }
        }),
        "An event that is to be kept for no time is kept for the default.",
        &["events::that_are_not_kept"],
    )
    .everywhere(),
    Fault::new(
        "events::several_are_new",
        &Does(Mode::SeveralAreNew),
        "Whether an event is kept is read in one statement, and it is written by a second one.",
        &["events::emitted_at_once"],
    )
    .everywhere(),
    Fault::new(
        "events::second_gets_an_error",
        &Does(Mode::SecondGetsAnError),
        "Of those who emit an event at once all but one get the violated index's error.",
        &["events::emitted_at_once"],
    )
    .everywhere(),
    Fault::new(
        "events::through_a_parser",
        &Emits(|event| event.payload = normalised(&event.payload)),
        "Payloads go through a JSON parser.",
        &["events::payloads_are_kept_byte_for_byte"],
    )
    .everywhere(),
    Fault::new(
        "events::null_is_no_payload",
        &Emits(|event| {
            if event.payload == Json::null() {
                event.keep = Delay::ZERO;
            }
        }),
        "An event whose payload is null is not found.",
        &["events::payloads_are_kept_byte_for_byte"],
    )
    .everywhere(),
    Fault::new(
        "events::too_large_is_kept",
        &Does(Mode::TooLargeIsKept),
        "The event is kept before its payload is refused.",
        &["events::too_large_is_refused"],
    )
    .everywhere(),
    Fault::new(
        "events::too_large_for_the_store",
        &Does(Mode::TooLargeForTheStore),
        "A payload over the cap is sent, and the connection breaks.",
        &["events::too_large_is_refused"],
    )
    .everywhere(),
    Fault::new(
        "events::purge_ignores_its_limit",
        &Does(Mode::PurgeIgnoresItsLimit),
        "A purge deletes all events that are over, whatever the limit.",
        &["events::purges_are_limited"],
    )
    .everywhere(),
    Fault::new(
        "events::purge_in_vain",
        &Does(Mode::PurgeInVain),
        "Nothing purges events.",
        &["events::purges_are_limited", "events::are_kept_for_their_time"],
    )
    .everywhere(),
];

#[derive(Clone, Copy)]
enum Mode {
    TheLastPayloadWins,
    KeptIsNew,
    NeverNewAgain,
    SeveralAreNew,
    SecondGetsAnError,
    TooLargeIsKept,
    TooLargeForTheStore,
    PurgeIgnoresItsLimit,
    PurgeInVain,
}

/// Changes what is emitted.
struct Emits(fn(&mut NewEvent));

#[async_trait]
impl Wrong for Emits {
    async fn emit(&self, real: &Real, event: &NewEvent) -> Result<Emitted> {
        let mut event = event.clone();
        (self.0)(&mut event);
        real.steps()?.emit(&event).await
    }
}

struct Does(Mode);

#[async_trait]
impl Wrong for Does {
    async fn write_step(&self, real: &Real, write: &StepWrite) -> Result<Stepped> {
        let mut stepped = real.steps()?.write_step(write).await?;
        if matches!(self.0, Mode::TheLastPayloadWins)
            && let StepAction::Wait(NewWait { event: Some(key), .. }) = &write.action
            && let Some(Step { state: StepState::Done(payload), .. }) = &mut stepped.step
            && let Some(last) = real.shared.payloads().get(key)
        {
            *payload = last.clone();
        }
        Ok(stepped)
    }

    async fn emit(&self, real: &Real, event: &NewEvent) -> Result<Emitted> {
        let known = real.shared.payloads().get(&event.key).cloned();
        let gaps = matches!(self.0, Mode::SeveralAreNew | Mode::SecondGetsAnError) && known.is_none();
        let others = real.shared.busy.fetch_add(usize::from(gaps), Ordering::SeqCst);
        if gaps {
            gap().await;
        }
        let answer = match (self.0, &known) {
            (Mode::NeverNewAgain, Some(payload)) => return Ok(Emitted::Kept(payload.clone())),
            _ => real.steps()?.emit(event).await,
        };
        real.shared.busy.fetch_sub(usize::from(gaps), Ordering::SeqCst);
        let too_large = matches!(&answer, Err(error) if error.kind() == ErrorKind::TooLarge);
        if !too_large {
            real.shared.payloads().insert(event.key.clone(), event.payload.clone());
        }
        match (self.0, answer) {
            (Mode::TheLastPayloadWins, Ok(Emitted::Kept(_))) => Ok(Emitted::Kept(event.payload.clone())),
            (Mode::KeptIsNew, Ok(Emitted::Kept(_))) => Ok(Emitted::New { woken: 0 }),
            (Mode::SeveralAreNew, Ok(Emitted::Kept(_))) if gaps => Ok(Emitted::New { woken: 0 }),
            (Mode::SecondGetsAnError, Ok(Emitted::Kept(_))) if gaps && others > 0 => {
                Err(Error::not_applied(ErrorKind::Permanent, "duplicate key value violates unique constraint"))
            }
            (Mode::TooLargeIsKept, Err(error)) if too_large => {
                real.steps()?.emit(&NewEvent { payload: Json::null(), ..event.clone() }).await?;
                Err(error)
            }
            (Mode::TooLargeForTheStore, Err(_)) if too_large => {
                Err(Error::new(ErrorKind::Permanent, Certainty::Unknown, "packet too large"))
            }
            (_, answer) => answer,
        }
    }

    async fn purge_events(&self, real: &Real, limit: Limit) -> Result<u64> {
        match self.0 {
            Mode::PurgeIgnoresItsLimit => real.steps()?.purge_events(Limit::MAX).await,
            Mode::PurgeInVain => Ok(0),
            _ => real.steps()?.purge_events(limit).await,
        }
    }
}
