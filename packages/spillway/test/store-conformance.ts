/**
 * What every adapter of the store's port must do, run on each engine. After each test the store's own audit has to be
 * empty, and what it does not look at (places of capacity gates, leases without lanes) has to be right too.
 */
import { afterEach, beforeEach, describe, expect } from 'vitest'
import { accepting } from './conformance/accepting.js'
import { crashing } from './conformance/crashing.js'
import { fairness } from './conformance/fairness.js'
import type { OpenedStore, OpenStore } from './conformance/harness.js'
import { leavingToOthers } from './conformance/leaving-to-others.js'
import { limits } from './conformance/limits.js'
import { settling } from './conformance/settling.js'
import { storm } from './conformance/storm.js'
import { sweeping } from './conformance/sweeping.js'
import { tickets } from './conformance/tickets.js'

export function storeConformance(name: string, openStore: OpenStore): void {
  describe(`the store on ${name}`, () => {
    let current: OpenedStore | undefined
    const opened = (): OpenedStore => {
      if (current === undefined) throw new Error('no store is open')
      return current
    }
    beforeEach(async () => {
      current = await openStore()
    })
    afterEach(async () => {
      const ended = opened()
      current = undefined
      try {
        expect(await ended.store.audit()).toEqual([])
        expect(await wrongGates(ended)).toEqual([])
      } finally {
        await ended.close()
      }
    })
    accepting(opened)
    settling(opened)
    leavingToOthers(opened)
    crashing(opened)
    limits(opened)
    tickets(opened)
    fairness(opened)
    sweeping(opened)
    storm(opened)
  })
}

/** Gates whose count is not that of the operations that hold a place in them. Rows of the caller's own are not ours. */
function wrongGates({ sql }: OpenedStore): Promise<object[]> {
  return sql(`SELECT * FROM (
      SELECT g.name, g.held::int, (SELECT count(*)::int FROM ops o WHERE o.gate = g.name) AS ops FROM gates g) x
    WHERE held <> ops AND name NOT LIKE 'own %'`)
}
