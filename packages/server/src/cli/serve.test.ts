import { describe, expect, it } from 'vitest'
import { ConfigError } from '../config/index.js'
import { configFor, greeting } from './serve.js'

describe('configFor', () => {
  it('lets flags win over the environment, by the same rules', () => {
    expect(configFor({ port: '0' }, { SPILLWAY_PORT: '99' }).config.server.port).toBe(0)
    expect(() => configFor({ port: 'x' }, {})).toThrow(ConfigError)
    expect(() => configFor({ host: '0.0.0.0' }, {})).toThrow(ConfigError)
  })

  it('listens when serving', () => {
    expect(configFor({}, {}).config).toMatchObject({
      listen: true,
      process: { roles: ['gateway', 'router', 'worker'] },
    })
  })

  it('makes a worker that listens only where a port is given', () => {
    const roles = { process: { roles: ['worker'] } }
    expect(configFor({ only: 'worker' }, {}).config).toMatchObject({ ...roles, listen: false })
    expect(configFor({ only: 'worker', port: '0' }, {}).config).toMatchObject({ ...roles, listen: true })
    expect(configFor({ only: 'worker' }, { PORT: '80' }).config).toMatchObject({ ...roles, listen: true })
  })
})

describe('greeting', () => {
  it.each(['127.0.0.1:7745', 'http://127.0.0.1:7745', 'http://127.0.0.1:7745/'])('prints a curl for %s', (address) => {
    expect(greeting(address)).toContain(
      `curl -X POST http://127.0.0.1:7745/api/v1/operations -H 'content-type: application/json' -d '{"type":"http.request","queue":"demo","payload":{"url":"http://127.0.0.1:7745/demo/echo","body":{"hello":"world"}}}'`,
    )
  })

  it.each([{ isGateway: false }, { mayCallItself: false }])('prints only served addresses (%j)', (options) => {
    expect(greeting('127.0.0.1:7745', options)).toContain('curl http://127.0.0.1:7745/health')
    expect(greeting('127.0.0.1:7745', options)).not.toContain('/api/')
  })
})
